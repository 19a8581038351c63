"""What ordinary programs do goes through the filter: Python's library, and utilities."""

import shutil

import pytest

from agent_envs.sandbox import Limits

LIMITS = Limits(wall_seconds=20, cpu_seconds=20)

PYTHON = r"""
import asyncio
async def main():
    process = await asyncio.create_subprocess_exec("echo", "hi", stdout=-1)
    assert (await process.communicate())[0] == b"hi\n"
    await asyncio.gather(*[asyncio.sleep(0.01) for _ in range(5)])
    assert await asyncio.to_thread(lambda: 5) == 5
asyncio.run(main())
#---
import multiprocessing
fork = multiprocessing.get_context("fork")
ours, theirs = fork.Pipe()
process = fork.Process(target=lambda: theirs.send([1]))
process.start()
assert ours.recv() == [1]
process.join()
queue, value = fork.Queue(), fork.Value("i", 0)
queue.put(3)
with value.get_lock(): value.value += queue.get()
#---
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=1 << 20)
memory.buf[0] = 1
memory.close()
memory.unlink()
#---
import sqlite3
connection = sqlite3.connect("x.db")
connection.execute("create table t(a)")
connection.execute("pragma journal_mode=wal")
connection.execute("insert into t values(2)")
connection.commit()
assert connection.execute("select * from t").fetchall() == [(2,)]
#---
import subprocess
done = subprocess.run("echo hi | tr a-z A-Z", shell=True, capture_output=True, text=True)
assert done.stdout == "HI\n"
subprocess.run(["true"], start_new_session=True, check=True)
#---
import signal
signal.signal(signal.SIGALRM, lambda *_: None)
signal.alarm(1)
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
signal.sigtimedwait([signal.SIGUSR1], 0.01)
#---
import os, resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.prlimit(os.getpid(), resource.RLIMIT_CORE)
os.nice(1)
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.getpriority(os.PRIO_PROCESS, 0), os.times(), os.sysconf("SC_PAGESIZE")
#---
import os
open("file", "w").write("text")
os.mkfifo("p"), os.symlink("p", "l"), os.link("file", "k"), os.chmod("k", 0o755)
os.utime("k", (1, 1)), os.truncate("k", 2), os.rename("k", "kk"), os.statvfs("."), os.listxattr(".")
source, target = os.pipe()
os.set_blocking(source, False), os.eventfd(0), os.pidfd_open(os.getpid()), os.urandom(3)
with open("file", "rb") as one, open("copy", "wb") as two:
    os.sendfile(two.fileno(), one.fileno(), 0, 2)
    os.copy_file_range(one.fileno(), two.fileno(), 1)
""".split("#---\n")

SHELL = r"""
cp: echo b > b; cp -a b c; cp -p b d; mkdir q; cp -r q r; mv d e; install -m 644 b i; cmp b c
find: mkdir -p q/r; echo x > q/r/s; find . -type f -name 's*' | xargs grep -c x; rm -r q
text: seq 9 | tac | sort -R | sort -n | uniq | head -5 | tail -2 | tr 5 x | cut -c1 | paste - -
awk: echo a b | awk '{print $2}' | sed s/b/c/ | tee t | wc -c; sed -i s/c/d/ t; grep d t
tar: echo a > a; tar czf t.tgz a; tar xzf t.tgz; gzip a; gunzip a.gz; md5sum a; base64 a
ln: ln -s a b; mkfifo p; echo x > a; readlink -f b; stat a; chmod 755 a; ln a c; touch -r a d
sh: (sleep 0.01 & wait); kill -0 $$; trap 'echo t' TERM; kill $$; timeout 1 true
mkfifo: mkfifo f; (cat f & echo x > f; wait); echo x | cat - | od -c | head -1
uname: uname -a; nproc; df .; du -s .; id; hostname; date; env; ulimit -a; nice true; sync
dd: dd if=/dev/zero of=d bs=1k count=4; truncate -s 5 d; head -c 5 /dev/urandom | wc -c
flock: flock l true; mktemp; split -l 1 l; nohup true; setsid true; stdbuf -oL true
tail: echo x > a; (tail -f a & sleep 0.2; kill $!)
bash: bash -c 'a=(1 2); diff <(echo 1) <(echo 1); read x <<< y; coproc cat; kill $COPROC_PID'
perl: perl -e 'open(F, "-|", "echo hi"); print <F>; fork() || exit; wait'
git: git init -q .; echo 1 > f; git add f; git -c user.email=a -c user.name=a commit -qm m; git log
make: printf 'b: a\n\tcp a b\n' > Makefile; echo > a; make -s
gcc: echo 'int main(){return 0;}' > m.c; gcc m.c -o m; ./m
python3: python3 -c 'print(1)'
""".strip().splitlines()


@pytest.mark.parametrize("program", PYTHON, ids=lambda program: program.strip().split("\n")[0])
def test_pythons_library_works(sandbox, program):
    result = sandbox.run_python(program, limits=LIMITS)
    assert result.status == "ok", result.stderr


@pytest.mark.parametrize("line", SHELL, ids=lambda line: line.split(":")[0])
def test_utilities_work(sandbox, line):
    name, _, script = line.partition(": ")
    if not shutil.which(name, path="/usr/local/bin:/usr/bin:/bin"):
        pytest.skip(f"no {name} here")
    result = sandbox.run_shell(f"set -e; {script}", limits=LIMITS)
    assert result.exit_code == 0, result.stderr
    assert "not permitted" not in result.stderr
