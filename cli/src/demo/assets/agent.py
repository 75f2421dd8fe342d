#!/usr/bin/env python3
"""A stand-in for a coding agent: moves a repository from textkit 1.4 to 2.0, one file per step.

Everything that it knows (its plan, its run's nonce, the steps done) is in this process's memory, as with a real agent:
a restart from nothing would begin again with another nonce. Each step edits a file, runs that file's test and commits.
Usage: agent.py REPO PACE_SECONDS
"""
import pathlib
import re
import secrets
import subprocess
import sys
import time

repo = pathlib.Path(sys.argv[1])
pace = float(sys.argv[2])
nonce = secrets.token_hex(8)
log = (repo.parent / "agent.log").open("a", buffering=1)

RENAMES = [
    (r"textkit\.slug\(([^,()]+), (\"[^\"]*\")\)", r"textkit.slugify(\1, separator=\2)"),
    (r"textkit\.slug\(", "textkit.slugify("),
    (r"textkit\.cut\((.+), (\d+)\)", r"textkit.truncate(\1, width=\2)"),
    (r"textkit\.words\(", "textkit.word_count("),
    (r"textkit\.title\(", "textkit.title_case("),
]


def say(text):
    print(text, flush=True)
    log.write(f"{nonce} {time.time():.3f} {text}\n")


def git(*args):
    subprocess.run(["git", "-C", str(repo), *args], check=True, stdout=subprocess.DEVNULL)


def tests(*names):
    run = subprocess.run([sys.executable, "-m", "unittest", "-q", *names], cwd=repo, capture_output=True, text=True)
    return run.returncode == 0, run.stderr


def pin(version):
    (repo / "requirements.txt").write_text(f"textkit=={version}\n")


modules = sorted(p for p in (repo / "newsletter").glob("*.py") if p.name != "__init__.py")
say(f"plan: {len(modules)} files")
git("checkout", "-q", "-b", "textkit-2.0")
pin("2.0")
git("commit", "-q", "-am", "use textkit 2.0")
for step, path in enumerate(modules, 1):
    time.sleep(pace)  # a model would be thinking
    text = path.read_text()
    for old, new in RENAMES:
        text = re.sub(old, new, text)
    path.write_text(text)
    ok, err = tests(f"tests.test_{path.stem}")
    if not ok:
        say(f"step {step} FAILED {path.name}\n{err}")
        sys.exit(1)
    git("commit", "-q", "-am", f"{path.stem}: move to textkit 2.0")
    say(f"step {step} of {len(modules)} done {path.name}")
ok, err = tests()
say("all tests pass" if ok else f"tests FAIL\n{err}")
say("finished")
sys.exit(0 if ok else 1)
