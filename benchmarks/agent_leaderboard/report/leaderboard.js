"use strict";
(() => {
  const board = JSON.parse(document.getElementById("board").textContent);
  const byId = (id) => document.getElementById(id);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const names = Object.fromEntries(board.agents.map((agent) => [agent.slug, agent.name]));

  /** Make an element; strings become text, never markup. */
  function make(tag, attributes = {}, ...children) {
    const isSvg = ["svg", "g", "line", "path", "text", "circle", "rect", "title"].includes(tag);
    const element = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "style") Object.assign(element.style, value);
      else if (name === "share") element.style.setProperty("--share", value);
      else if (value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  const percent = (value) => (100 * value).toFixed(1);
  const signed = (value, digits = 1) => (value < 0 ? "−" : value > 0 ? "+" : "") + Math.abs(value).toFixed(digits);
  function short(value) {
    if (value === null || value === undefined) return "–";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(size < 0.001 ? 2 : 3)));
  }
  const pValue = (value) => (value < 0.001 ? "< 0.001" : value.toFixed(3));

  // Theme

  const themes = ["auto", "light", "dark"];
  const themeButton = byId("theme");
  function setTheme(theme) {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    themeButton.textContent = "Theme: " + theme;
    themeButton.dataset.value = theme;
    try { localStorage.setItem("leaderboard-theme", theme); } catch { /* a file may have no storage */ }
  }
  let stored = "auto";
  try { stored = localStorage.getItem("leaderboard-theme"); } catch { /* the same */ }
  setTheme(themes.includes(stored) ? stored : "auto");
  themeButton.hidden = false;
  themeButton.addEventListener("click", () => {
    setTheme(themes[(themes.indexOf(themeButton.dataset.value) + 1) % themes.length]);
  });

  // Sorting

  function sortBy(heading) {
    const table = heading.closest("table");
    const column = [...heading.parentElement.children].indexOf(heading);
    const isNumber = heading.querySelector(".sort").hasAttribute("data-number");
    const before = heading.getAttribute("aria-sort");
    // Numbers begin with the largest, except ranks; names with A.
    const first = isNumber && heading.textContent.trim() !== "rank" ? "descending" : "ascending";
    const direction = before === "none" ? first : before === "ascending" ? "descending" : "ascending";
    all("th[aria-sort]", heading.parentElement).forEach((other) => other.setAttribute("aria-sort", "none"));
    heading.setAttribute("aria-sort", direction);
    const sign = direction === "ascending" ? 1 : -1;
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [row, row.cells[column].dataset.value ?? ""]);
    rows.sort(([, one], [, other]) => {
      if (one === "" || other === "") return (one === "") - (other === "");  // what is missing comes last
      return sign * (isNumber ? one - other : one.localeCompare(other, "en", { numeric: true }));
    });
    body.append(...rows.map(([row]) => row));
  }
  all(".sortable .sort").forEach((button) => button.addEventListener("click", () => sortBy(button.closest("th"))));

  // Filters

  const filters = byId("filters");
  const shown = { agent: [], environment: [] };
  function applyFilters() {
    const words = byId("find").value.trim().toLowerCase();
    const checked = (kind) => all(`input[name=${kind}]:checked`, filters).map((box) => box.value);
    const chosen = { agent: checked("agent"), environment: checked("environment") };
    const hits = {
      agent: chosen.agent.filter((slug) => (names[slug] + " " + slug).toLowerCase().includes(words)),
      environment: chosen.environment.filter((slug) => slug.toLowerCase().includes(words)),
    };
    for (const kind of ["agent", "environment"]) {
      // Words that match only agents, or only environments, leave the others as they are.
      shown[kind] = words && hits[kind].length === 0 && hits[kind === "agent" ? "environment" : "agent"].length ? chosen[kind] : hits[kind];
      all(`[data-count=${kind}]`).forEach((count) => {
        count.textContent = `${shown[kind].length} of ${all(`input[name=${kind}]`, filters).length}`;
      });
    }
    all("main [data-agent], main [data-environment]").forEach((element) => {
      const { agent, environment } = element.dataset;
      element.hidden = (agent !== undefined && !shown.agent.includes(agent)) ||
        (environment !== undefined && !shown.environment.includes(environment));
    });
    const counts = Object.entries(shown).map(([kind, { length }]) => `${length} ${kind}${length === 1 ? "" : "s"}`);
    byId("shown").textContent = counts.join(", ") + " shown";
    drawScatter();
    drawTasks();
    drawPairs();
    drawKinds();
  }
  filters.addEventListener("input", applyFilters);
  filters.addEventListener("submit", (event) => event.preventDefault());
  byId("show-all").addEventListener("click", () => { filters.reset(); applyFilters(); });

  const fill = (select, options) => select.replaceChildren(
    ...options.map(([value, label]) => make("option", { value }, label)));
  const environmentOptions = board.environments.map(({ slug }) => [slug, slug]);
  const plain = board.environments.filter(({ is_attacked }) => !is_attacked).map(({ slug }) => slug);
  const agentOptions = board.agents.map(({ slug, name }) => [slug, name]);

  // Cost against score

  const costs = board.costs.filter((kind) =>
    Object.values(board.cells).some((cell) => cell[kind]));
  fill(byId("cost-kind"), costs.map((kind) => [kind, kind]));
  byId("cost-environment").append(...environmentOptions.map(([value, label]) => make("option", { value }, label)));

  function points() {
    const environment = byId("cost-environment").value, kind = byId("cost-kind").value;
    const wanted = environment ? [environment] : shown.environment.filter((slug) => plain.includes(slug));
    return shown.agent.flatMap((agent) => {
      const cells = wanted.map((slug) => board.cells[slug + "/" + agent]);
      if (!cells.length || cells.some((cell) => !cell || cell[kind] === null)) return [];
      const isSure = kind === "turns" || board.agents.find(({ slug }) => slug === agent).is_recounted;
      if (!isSure && cells.some((cell) => cell[kind] === 0)) return [];  // unknown, not free
      const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
      const isAll = !environment && wanted.length === plain.length;
      const interval = environment ? cells[0].success : isAll ? board.overall[agent] : null;
      return [{ agent, x: mean(cells.map((cell) => cell[kind])), y: mean(cells.map((cell) => cell.success[0])), interval, isSure }];
    });
  }

  /** Return where a cost stands on the axis, from 0 to 1, and the ticks: logarithmic, 0 apart on the left. */
  function costScale(values) {
    const positive = values.filter((value) => value > 0);
    const hasZero = positive.length < values.length;
    if (!positive.length) return { place: () => 0.02, ticks: [0] };
    let low = Math.floor(Math.log10(Math.min(...positive)) - 0.05), high = Math.ceil(Math.log10(Math.max(...positive)) + 0.05);
    if (high - low < 1) high = low + 1;
    const start = hasZero ? 0.12 : 0.02;
    const place = (value) => value > 0 ? start + (0.97 - start) * (Math.log10(value) - low) / (high - low) : 0.02;
    const steps = high - low > 2 ? [1] : [1, 2, 5];
    const ticks = hasZero ? [0] : [];
    for (let power = low; power <= high; power++) {
      for (const step of steps) if (power < high || step === 1) ticks.push(step * 10 ** power);
    }
    return { place, ticks };
  }

  const SHAPES = [
    "M-6,0A6,6 0 1,0 6,0A6,6 0 1,0 -6,0Z", "M-5.5,-5.5H5.5V5.5H-5.5Z", "M0,-7L7,5H-7Z", "M0,-7.5L7.5,0L0,7.5L-7.5,0Z",
    "M0,7L7,-5H-7Z", "M-2,-7H2V-2H7V2H2V7H-2V2H-7V-2H-2Z",
  ];

  function drawScatter() {
    const kind = byId("cost-kind").value, found = points();
    const narrow = byId("cost").clientWidth < 620;
    const width = narrow ? 420 : 960, height = narrow ? 380 : 430;
    const left = 46, right = width - 14, top = 30, bottom = height - 44;
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Success against ${kind} per episode` });
    const { place, ticks } = costScale(found.map(({ x }) => x));
    const toX = (value) => left + place(value) * (right - left), toY = (value) => bottom - value * (bottom - top);
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      svg.append(make("line", { class: "grid", x1: left, x2: right, y1: toY(share), y2: toY(share) }),
        make("text", { x: left - 8, y: toY(share) + 4, "text-anchor": "end" }, String(100 * share)));
    }
    ticks.forEach((tick) => svg.append(make("line", { class: "grid", x1: toX(tick), x2: toX(tick), y1: top, y2: bottom }),
      make("text", { x: toX(tick), y: bottom + 17, "text-anchor": "middle" }, short(tick))));
    svg.append(make("text", { x: left, y: height - 6 }, `${kind} per episode, logarithmic`), make("text", { x: 4, y: 15 }, "success %"));
    drawFrontier(svg, found, toX, toY);
    drawPoints(svg, found, toX, toY, { left, right, top, bottom }, kind);
    byId("scatter").replaceChildren(found.length ? svg : make("p", { class: "hint" }, "No agent that is shown played all of these environments, with this cost known."));
  }

  function drawFrontier(svg, found, toX, toY) {
    let best = -1, path = "";
    const rivals = found.filter(({ agent, isSure }) => isSure && !board.agents.find(({ slug }) => slug === agent).is_upper_bound);
    for (const { x, y } of [...rivals].sort((one, other) => one.x - other.x || other.y - one.y)) {
      if (y <= best) continue;
      path += path ? `H${toX(x)}V${toY(y)}` : `M${toX(x)},${toY(y)}`;
      best = y;
    }
    if (path) svg.append(make("path", { class: "frontier", d: path }));
  }

  function drawPoints(svg, found, toX, toY, edges, kind) {
    const taken = found.map(({ x, y }) => ({ x: toX(x) - 8, y: toY(y) - 8, w: 16, h: 16 }));
    const isFree = (box) => box.x >= edges.left && box.x + box.w <= edges.right + 8 && box.y >= 0 && box.y + box.h <= edges.bottom + 4 &&
      !taken.some((other) => box.x < other.x + other.w && other.x < box.x + box.w && box.y < other.y + other.h && other.y < box.y + box.h);
    for (const { agent, x, y, interval, isSure } of found) {
      const index = board.agents.findIndex(({ slug }) => slug === agent), colour = `var(--c${index % 8})`;
      const cx = toX(x), cy = toY(y), label = names[agent].length > 24 ? names[agent].slice(0, 23) + "…" : names[agent];
      const text = `${names[agent]}: ${percent(y)} % at ${short(x)} ${kind}${isSure ? "" : " (not recounted)"}`;
      const point = make("g", { class: "point", tabindex: 0, role: "img", "aria-label": text }, make("title", {}, text));
      if (interval) point.append(make("line", { x1: cx, x2: cx, y1: toY(interval[1]), y2: toY(interval[2]), style: { stroke: colour, strokeWidth: "1.5", opacity: ".7" } }));
      point.append(make("path", { class: "mark", d: SHAPES[index % SHAPES.length], transform: `translate(${cx},${cy})`, style: { fill: colour } }));
      const w = 7 * label.length + 6, h = 15, boxes = [];
      for (const away of [0, 16, -16, 32, -32, 48, -48, 64, -64]) {
        boxes.push({ x: cx + 11, y: cy - 8 + away, w, h, away }, { x: cx - 11 - w, y: cy - 8 + away, w, h, away });
      }
      const box = boxes.find(isFree);
      if (box) {
        taken.push(box);
        const isLeft = box.x < cx, edge = isLeft ? box.x + w - 2 : box.x + 2;
        if (box.away) point.append(make("line", { x1: cx, y1: cy, x2: edge, y2: box.y + 8, style: { stroke: colour, opacity: ".45" } }));
        point.append(make("text", { class: "name", x: edge, y: box.y + 12, "text-anchor": isLeft ? "end" : "start" }, label));
      }
      svg.append(point);
    }
  }
  ["cost-environment", "cost-kind"].forEach((id) => byId(id).addEventListener("change", drawScatter));
  let lastWidth = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== lastWidth) { lastWidth = innerWidth; drawScatter(); } });

  // Pairs

  fill(byId("pair-first"), agentOptions);
  fill(byId("pair-second"), agentOptions);
  byId("pair-second").selectedIndex = Math.min(1, agentOptions.length - 1);

  function comparison(environment, first, second) {
    const found = board.comparisons[[environment, first, second].join("/")];
    if (found) return found;
    const other = board.comparisons[[environment, second, first].join("/")];
    if (!other) return null;
    const [mean, low, high, tasks] = other.difference;
    return { ...other, difference: [-mean, -high, -low, tasks], num_better: other.num_worse, num_worse: other.num_better };
  }

  function drawPairs() {
    const first = byId("pair-first").value, second = byId("pair-second").value;
    const heading = (label, isNumber) => make("th", { scope: "col", class: isNumber ? "number" : null }, label);
    const rows = shown.environment.flatMap((environment) => {
      const found = first === second ? null : comparison(environment, first, second);
      return found ? [pairRow(environment, found)] : [];
    });
    byId("pair-table").replaceChildren(
      make("thead", {}, make("tr", {}, heading("environment"), heading("difference", true), heading("interval, −100 to 100"), heading("", true),
        heading("better", true), heading("equal", true), heading("worse", true), heading("p", true), heading("p, Holm", true))),
      make("tbody", {}, ...(rows.length ? rows : [make("tr", {}, make("td", { colspan: 9, class: "none" }, "Choose two agents that played the same tasks."))])));
  }

  function pairRow(environment, { difference: [mean, low, high, tasks], num_better, num_equal, num_worse, p_value: p, p_holm }) {
    const verdict = low > 0 ? "better" : high < 0 ? "worse" : "";
    const left = (value) => `${50 + 50 * value}%`;
    return make("tr", {}, make("th", { scope: "row" }, environment),
      make("td", { class: "number" }, verdict ? make("b", {}, signed(100 * mean)) : signed(100 * mean)),
      make("td", {}, make("div", { class: "effect " + verdict, "aria-hidden": "true" },
        make("i", { style: { left: left(low), width: `${50 * (high - low)}%` } }), make("b", { style: { left: left(mean) } }))),
      make("td", { class: "number", title: `${tasks} tasks` }, `${signed(100 * low)} to ${signed(100 * high)}`),
      ...[num_better, num_equal, num_worse].map((count) => make("td", { class: "number" }, String(count))),
      ...[p, p_holm].map((value) => make("td", { class: "number" }, pValue(value))));
  }
  ["pair-first", "pair-second"].forEach((id) => byId(id).addEventListener("change", drawPairs));

  // Tasks

  fill(byId("task-environment"), environmentOptions);
  const MAX_TASKS = 200;
  const bounds = new Set(board.agents.filter(({ is_upper_bound }) => is_upper_bound).map(({ slug }) => slug));

  /** Draw the tasks of an environment on which the agents shown differ, those that divide them most first. */
  function drawTasks() {
    const environment = byId("task-environment").value;
    // An upper bound solves what nobody else does: it says nothing of where agents differ.
    const agents = shown.agent.filter((agent) => !bounds.has(agent) && board.cells[environment + "/" + agent]);
    const scores = agents.map((agent) => board.cells[environment + "/" + agent].scores);
    const tasks = Object.entries(board.tasks[environment] ?? {}).map(([task, id]) => {
      const own = scores.map((of) => of[task]), known = own.filter((score) => score !== undefined);
      const mean = known.reduce((sum, score) => sum + score, 0) / (known.length || 1);
      return { task, id, own, mean, spread: Math.max(...known) - Math.min(...known), divided: Math.abs(mean - 0.5) };
    });
    const count = (test) => tasks.filter(test).length;
    const differing = tasks.filter(({ spread }) => spread > 0);
    differing.sort((one, other) => one.divided - other.divided || one.task - other.task);
    const mark = (score) => score === undefined ? make("td", { class: "none" }, "–")
      : make("td", { class: "number" }, score === 1 ? make("span", { class: "ok" }, "✓") : score === 0 ? make("span", { class: "fail" }, "✗") : percent(score));
    byId("task-table").replaceChildren(
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "task"), ...agents.map((agent) => make("th", { scope: "col", class: "number" }, names[agent])))),
      make("tbody", {}, ...(differing.length ? differing.slice(0, MAX_TASKS).map(({ id, own }) => make("tr", {}, make("th", { scope: "row" }, id), ...own.map(mark)))
        : [make("tr", {}, make("td", { class: "none", colspan: agents.length + 1 }, "The agents shown solve the same tasks."))])));
    byId("task-hint").textContent = `Of ${tasks.length} tasks, all agents shown solve ${count(({ spread, mean }) => spread === 0 && mean === 1)}, ` +
      `none solves ${count(({ spread, mean }) => spread === 0 && mean === 0)}, and they differ on ${differing.length}` +
      (differing.length > MAX_TASKS ? ` (${MAX_TASKS} are shown).` : ".");
  }
  byId("task-environment").addEventListener("change", drawTasks);

  // Breakdown

  const KINDS = {
    group: ["kind of task", "Success in %, with the number of tasks in brackets and the interval on hover."],
    terms: ["reward term", "What each term adds to the return of an episode, on average."],
    errors: ["mistake", "Steps with the mistake; in brackets the episodes that made it at least once."],
    stops: ["end of the episode", "Why episodes ended, those that are not scored included."],
    metrics: ["metric", "Mean over the episodes that have it."],
    samples: ["samples", "pass@k: at least one of k samples is right. pass^k: all of k are. In %."],
  };
  fill(byId("kind-environment"), environmentOptions);
  fill(byId("kind-what"), Object.entries(KINDS).map(([value, [label]]) => [value, label]));

  /** Return the rows of a cell: label, text, and share (0 to 1) for a tint, title. */
  function kindRows(cell, what) {
    if (what === "group") return cell.groups.map(([label, value, [mean, low, high, tasks]]) => [`${label}: ${value}`,
      { text: `${percent(mean)} (${tasks})`, share: mean, title: `${percent(low)} to ${percent(high)}` }]);
    if (what === "errors") return Object.entries(cell.errors).map(([code, [steps, episodes]]) => [code, { text: `${steps} (${episodes})` }]);
    if (what === "stops") return Object.entries(cell.stop_reasons).map(([reason, count]) => [reason, { text: String(count) }]);
    if (what === "samples") return [["pass@", cell.pass_at], ["pass^", cell.pass_hat]].flatMap(([name, values]) =>
      Object.entries(values).map(([k, value]) => [name + k, { text: percent(value), share: value }]));
    return Object.entries(what === "terms" ? cell.reward_terms : cell.metrics).map(([name, value]) => [name, { text: short(value) }]);
  }

  function drawKinds() {
    const environment = byId("kind-environment").value, what = byId("kind-what").value;
    const agents = shown.agent.filter((agent) => board.cells[environment + "/" + agent]);
    const columns = agents.map((agent) => new Map(kindRows(board.cells[environment + "/" + agent], what)));
    const labels = [...new Set(columns.flatMap((column) => [...column.keys()]))];
    const rows = labels.map((label) => make("tr", {}, make("th", { scope: "row" }, label), ...columns.map((column) => {
      const found = column.get(label);
      if (!found) return make("td", { class: "number none" }, "–");
      return make("td", { class: "number" + ("share" in found ? " heat" : ""), share: found.share ?? 0, title: found.title }, found.text);
    })));
    byId("kind-table").replaceChildren(
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, KINDS[what][0]), ...agents.map((agent) => make("th", { scope: "col", class: "number" }, names[agent])))),
      make("tbody", {}, ...(rows.length ? rows : [make("tr", {}, make("td", { class: "none", colspan: agents.length + 1 }, "Nothing of this kind."))])));
    byId("kind-hint").textContent = KINDS[what][1];
  }
  ["kind-environment", "kind-what"].forEach((id) => byId(id).addEventListener("change", drawKinds));

  // Episodes

  const viewer = byId("viewer");
  let open = { key: null, index: 0 };

  function openViewer(key, index = 0) {
    const episodes = board.episodes[key];
    if (!episodes) return;
    const [environment, agent] = key.split("/");
    const cell = board.cells[key];
    byId("viewer-title").textContent = `${environment} · ${names[agent]}`;
    byId("viewer-list").replaceChildren(...episodes.map((episode, i) => {
      const mark = episode.success ? make("span", { class: "ok", "aria-label": "success" }, "✓") : make("span", { class: "fail", "aria-label": "failure" }, episode.fault === null ? "✗" : "!");
      const button = make("button", { type: "button" }, mark, make("span", {}, `task ${episode.task}` + (episode.sample ? ` · ${episode.sample + 1}` : "")), make("span", {}, signed(episode.return, 2)));
      button.addEventListener("click", () => showEpisode(i));
      return make("li", {}, button);
    }), make("li", { class: "hint" }, `${episodes.length} of ${Math.max(cell.num_episodes, episodes.length)} episodes`));
    open = { key, index };
    if (!viewer.open) viewer.showModal();
    showEpisode(Math.min(index, episodes.length - 1));
    byId("viewer-title").focus();
  }

  function showEpisode(index) {
    const episodes = board.episodes[open.key];
    open.index = index;
    all("#viewer-list button").forEach((button, i) => button.setAttribute("aria-current", String(i === index)));
    all("#viewer-list button")[index]?.scrollIntoView({ block: "nearest" });
    byId("viewer-previous").disabled = index === 0;
    byId("viewer-next").disabled = index === episodes.length - 1;
    byId("viewer-episode").replaceChildren(...episodeParts(episodes[index]));
    byId("viewer-episode").scrollTop = 0;
    history.replaceState(null, "", `#episode/${open.key}/${index}`);
  }

  const badge = (text, kind = "") => make("span", { class: "badge " + kind }, text);
  const said = (who, text, kind = "") => make("div", { class: "said " + kind }, make("span", { class: "who" }, who), make("pre", {}, text));

  function episodeParts(episode) {
    const usage = Object.entries(episode.usage).filter(([, value]) => value);
    const parts = [make("div", { class: "badges" }, badge(episode.success ? "success" : episode.fault === null ? "failure" : "not scored", episode.success ? "ok" : "fail"),
      badge(`return ${signed(episode.return, 3)}`), badge(episode.stop.replaceAll("_", " ")), badge(`${episode.task_id} · seed ${episode.seed}`),
      ...Object.entries(episode.labels).map(([key, value]) => badge(`${key}: ${value}`)))];
    if (episode.fault !== null) parts.push(said("fault", episode.fault));
    if (episode.note) parts.push(make("p", { class: "hint" }, episode.note));
    if (episode.question !== null) parts.push(said("task", episode.question));
    episode.steps.forEach((step, i) => parts.push(stepPart(step, i)));
    if (episode.answers?.length) parts.push(make("div", { class: "step" }, said(episode.answers.length > 1 ? "gold answers" : "gold answer", episode.answers.join("\n"))));
    if (episode.attempts.length) {
      parts.push(make("details", {}, make("summary", {}, `Other attempts (${episode.attempts.length}), which cost but do not count`),
        ...episode.attempts.flatMap((attempt, i) => attempt.map((action) => said(`attempt ${i + 1}`, action, "agent")))));
    }
    const facts = [...Object.entries(episode.metrics), ...usage];
    parts.push(make("details", {}, make("summary", {}, "Metrics and costs"), make("table", { class: "facts" }, make("tbody", {},
      ...facts.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", { class: "number" }, short(value))))))));
    return parts;
  }

  function stepPart(step, i) {
    const terms = Object.entries(step.terms).map(([name, value]) => badge(`${name} ${signed(value, 3)}`, value > 0 ? "ok" : "fail"));
    const part = make("section", { class: "step" }, make("h3", {}, `Step ${i + 1}`, badge(`reward ${signed(step.reward, 3)}`), ...terms, step.error ? badge(step.error, "fail") : null), said("agent", step.action, "agent"));
    if (step.call) part.append(make("div", { class: "understood" }, "understood as ", make("code", {}, step.call)));
    if (step.observation) part.append(said("environment", step.observation));
    return part;
  }

  const move = (by) => { const next = open.index + by; if (board.episodes[open.key][next]) showEpisode(next); };
  byId("viewer-previous").addEventListener("click", () => move(-1));
  byId("viewer-next").addEventListener("click", () => move(1));
  byId("viewer-close").addEventListener("click", () => viewer.close());
  viewer.addEventListener("click", (event) => { if (event.target === viewer) viewer.close(); });
  viewer.addEventListener("close", () => history.replaceState(null, "", location.pathname + location.search));
  viewer.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") move(-1);
    if (event.key === "ArrowRight") move(1);
  });
  all("[data-open]").forEach((button) => button.addEventListener("click", () => openViewer(button.dataset.open)));
  function followHash() {
    const match = /^#episode\/([^/]+\/[^/]+)\/(\d+)$/.exec(location.hash);
    if (match) openViewer(match[1], Number(match[2]));
  }
  addEventListener("hashchange", followHash);

  filters.hidden = false;
  all(".scripted").forEach((section) => { section.hidden = false; });
  applyFilters();
  followHash();
})();
