"""WebShop against a small server that speaks the same protocol."""

import ast
import contextlib
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import gymnasium as gym
import pytest

from agent_envs import ConfigurationError, DataError
from agent_envs.envs.web.web_shop import _Page, _read_page
from tests.agent_envs.envs.playing import call, make
from tests.agent_envs.test_catalogue import check_declarations
from tests.agent_envs.test_ways import check_ways

ID = "AgentR1/WebShop-v0"
PRODUCTS = {"B001": "red mug", "B002": "blue mug"}


class Shop(BaseHTTPRequestHandler):
    """The pages of WebShop, as far as they matter."""

    def do_GET(self):
        parts = [urllib.parse.unquote(part) for part in self.path.strip("/").split("/")]
        page = getattr(self, parts[0], None)
        body = page(*parts[1:]) if page else self.index(parts[0])
        html = f"<html><head><title>WebShop</title></head><body>{body}<!-- hm --></body></html>"
        self.send_response(200 if body else 500)
        self.end_headers()
        self.wfile.write(html.encode())

    def index(self, session):
        goal = session.removeprefix("fixed_")
        return f"<h4>Instruction: goal {goal}: buy a large red mug</h4><button>Search</button>"

    def search_results(self, session, keywords, page):
        links = "".join(
            f'<h4><a class="product-link" href="#">{number}</a></h4><h4>{name}</h4>'
            for number, name in PRODUCTS.items()
            if set(keywords.split()) & set(name.split())
        )
        back = "<button>Back to Search</button><button>Next &gt;</button>"
        return f"{back}<p>Page {page}</p>{links}"

    def item_page(self, session, item, keywords, page, options):
        chosen = ast.literal_eval(options)
        return (
            "<button>Back to Search</button><button>&lt; Prev</button>"
            "<h4>size</h4><label>small</label><label>large</label>"
            f"<h2>{PRODUCTS[item]} {sorted(chosen.items())}</h2>"
            "<button>Description</button><button>Buy Now</button>"
        )

    def item_sub_page(self, session, item, keywords, page, subpage, options):
        return f"<button>&lt; Prev</button><p>{subpage} of {item}</p>"

    def done(self, session, item, options):
        score = 0.5 * (item == "B001") + 0.5 * (ast.literal_eval(options) == {"size": "large"})
        return f"<h3>Your score (min 0.0, max 1.0)</h3><pre>{score}</pre>"

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def base_url():
    with ThreadingHTTPServer(("127.0.0.1", 0), Shop) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def env(base_url):
    env = make(ID, task=7, base_url=base_url, split="test")
    yield env
    env.close()


def do(env, name, argument):
    key = "keywords" if name == "search" else "button"
    observation, *_, info = call(env, name, **{key: argument})
    return observation, info


def test_the_right_product_and_option_earn_the_full_score(env):
    question, _ = env.reset(options={"task": 7})
    assert question == "Instruction: goal 7: buy a large red mug\n[Search]"
    results, _ = do(env, "search", "red mug")
    assert results.splitlines()[-4:] == ["[B001]", "red mug", "[B002]", "blue mug"]
    item, _ = do(env, "click", "[B001]")
    assert "[large]" in item
    chosen, _ = do(env, "click", "large")
    assert "[[large]]" in chosen
    assert "red mug [('size', 'large')]" in chosen
    assert do(env, "click", "Description")[0].endswith("Description of B001")
    assert "[[large]]" in do(env, "click", "< Prev")[0]
    _, reward, terminated, _, info = call(env, "click", button="Buy Now")
    assert terminated
    assert reward == pytest.approx(1.0)
    assert info["metrics"]["success"] == info["metrics"]["score"] == 1.0


def test_a_missing_button_is_a_tool_error_and_half_a_match_earns_half(env):
    text, info = do(env, "click", "Buy Now")
    assert info["action"]["error"] == "tool_error"
    assert text == "There is no 'Buy Now' here; there are: Search."
    do(env, "search", "mug")
    assert 'Click "Back to Search" first.' in do(env, "search", "again")[0]
    assert "Page 2" in do(env, "click", "Next >")[0]
    assert "goal 7" in do(env, "click", "Back to Search")[0]
    do(env, "search", "mug")
    do(env, "click", "B001")
    _, info = do(env, "click", "Buy Now")
    assert info["metrics"]["score"] == info["reward_terms"]["score"] == 0.5
    assert info["metrics"]["success"] == 0.0


def test_no_reward_hacking_probe_earns_more_than_the_shortest_solution(env):
    calls = [("search", "keywords", "red mug"), ("click", "button", "B001")]
    calls += [("click", "button", "large"), ("click", "button", "Buy Now")]
    actions = [env.unwrapped.write_call(tool, **{name: text}) for tool, name, text in calls]
    check_ways(env, env.spec, actions)
    check_declarations(env)


@pytest.mark.parametrize("piece", ["<!--", '<a href="', "<h4 class='", "<i", "<b>", "</a>", "&"])
def test_a_page_of_broken_tags_is_read_in_linear_time(piece):  # else it takes minutes
    shown = _read_page((piece * 100_000)[:100_000] + "-->><button>Buy</button>", _Page("results"))
    assert shown.buttons == {"Buy"}


def test_a_page_sent_slowly_times_out(env, monkeypatch):
    released = threading.Event()

    def drip(self):
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has disconnected
            while not released.wait(0.05):
                self.wfile.write(b" ")  # each within httpx's own limit, which is for single reads

    monkeypatch.setattr(Shop, "do_GET", drip)
    monkeypatch.setattr("agent_envs.envs.web.web_shop._SECONDS", 0.3)
    text, info = do(env, "search", "mug")
    released.set()
    assert "did not answer: TimeoutError" in text
    assert info["action"]["error"] == "tool_error"
    assert env.unwrapped.is_finished() is False


def test_a_missing_server_and_wrong_arguments_are_errors():
    env = gym.make(ID, base_url="http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"127\.0\.0\.1:9: the WebShop server did not answer"):
        env.reset(seed=0)
    with pytest.raises(ConfigurationError, match="base_url must begin with http"):
        gym.make(ID, base_url="localhost:3000")
