"""Runs the named scenarios, or all but (j), in order, each in a fresh namespace, and ends with `N passed, N failed`.

A scenario that fails is run once more; one that passes then is reported as flaky. What the operator, the routers and
the events say is shown for the first failure.
"""

import os
import shutil
import sys
import time
import traceback

import core
from core import install
from lib import KEEP, SYSTEM, Steps, kubectl, log, namespace
from real import j_real_vllm

SCENARIOS = {**core.SCENARIOS, "j": j_real_vllm}

# While writing a scenario: no second try.
ONCE = bool(os.environ.get("KVROUTER_E2E_ONCE"))


class Skipped(Exception):
    """The cluster lacks what a scenario needs."""


class ScenarioSteps(Steps):
    def skip(self, why):
        raise Skipped(why)


def attempt(letter, number):
    """None, or what went wrong."""
    name = "demo" if KEEP else f"e2e-{letter}-{number}-{int(time.time()) % 100000}"
    steps = ScenarioSteps()
    try:
        namespace(name)
        if letter != "a":
            ensure_installed(steps)
        SCENARIOS[letter](steps, name)
        return None
    except Skipped as why:
        print(f"   skipped: {why}", flush=True)
        return why
    except Exception as error:  # whatever a scenario stumbles over is its failure, not the runner's
        log("".join(traceback.format_exception(error)[-3:]))
        diagnose(name)
        return error
    finally:
        if not KEEP:
            kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found", check=False)


def ensure_installed(steps):
    found = kubectl("get", "deployments", "-n", SYSTEM, "-o", "name", check=False).stdout
    if not found:
        install(steps)


def diagnose(ns):
    """What a person would look at first."""
    for command in (
        ("get", "pods", "-o", "wide", "-n", ns),
        ("get", "kvr,kvpool", "-n", ns, "-o", "yaml"),
        ("get", "events", "-n", ns, "--sort-by=.lastTimestamp"),
        ("logs", "-n", SYSTEM, "-l", "app.kubernetes.io/name=kv-router-operator", "--tail=40"),
        ("logs", "-n", ns, "-l", "app.kubernetes.io/name=kv-router", "--tail=20"),
        ("logs", "-n", ns, "-l", "app=qwen", "-c", "engine", "--tail=20"),
    ):
        done = kubectl(*command, check=False)
        log(f"--- kubectl {' '.join(command)}\n{done.stdout[-6000:]}{done.stderr[-2000:]}")


def main(letters):
    passed, failed, skipped, flaky = [], {}, [], []
    began = time.monotonic()
    for letter in letters:
        print(f"== {SCENARIOS[letter].__doc__.strip()}", flush=True)
        started = time.monotonic()
        error = attempt(letter, 1)
        if isinstance(error, Skipped):
            skipped.append(letter)
            continue
        if error is not None and not ONCE:
            print(f"   {error}\n   once more in a fresh namespace", flush=True)
            error = attempt(letter, 2)
            if error is None:
                flaky.append(letter)
        if error is None:
            passed.append(letter)
        else:
            failed[letter] = error
        print(f"-- {letter}: {'ok' if error is None else f'FAILED: {error}'} in {time.monotonic() - started:.0f} s", flush=True)
    if flaky:
        print(f"flaky, which is a defect to mend: {' '.join(flaky)}")
    print(f"scenarios took {time.monotonic() - began:.0f} s")
    for letter, error in failed.items():
        print(f"failed: ({letter}) {error}")
    if KEEP:
        print(f"it stays up; try\n  export KUBECONFIG={os.environ['KUBECONFIG']} PATH={os.path.dirname(shutil.which('kubectl'))}:$PATH\n  kubectl get kvr,kvpool,pods -n demo\n"
              "  kubectl describe kvr sim -n demo\n  make cluster-down     # when you are done")
    print(f"{len(passed)} passed, {len(failed)} failed" + (f", {len(skipped)} skipped" if skipped else ""), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(core.SCENARIOS)
    unknown = [letter for letter in chosen if letter not in SCENARIOS]
    if unknown:
        sys.exit(f"no scenario {unknown[0]}: there are {' '.join(SCENARIOS)}")
    sys.exit(main(chosen))
