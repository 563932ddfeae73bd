"""Scenario (j): real vLLM as pods of a pool. On demand: it needs the engines of `e2e/engines/install.sh` on the nodes.

The nodes are this machine, so a pod mounts the installation, its Python and the system's libraries read-only instead of
having an image of several gigabytes.
"""

import json
import os
import time

from lib import IMAGES, LONG, RESTRICTED, apply, chosen, expect, get, kubectl, pool, ready, receipts, report, router, router_pods, service_url, wait, wait_condition

ENGINES = os.environ.get("ENGINES", os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "kvrouter", "engines"))
REAL_MODEL = "tiny"
BLOCK = 32  # vLLM's CPU attention takes multiples of it only
THINK_SECONDS = 1.5  # from an answer to the next question; on busy cores vLLM's events come up to a second late
START_SECONDS = 420  # two engines that import torch at once on two cores


def vllm(name, replicas):
    """A Deployment of real vLLM, with the flags that kvrouter asks for and those that a small CPU needs."""
    publisher = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "",
                 "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}
    environment = {
        "HOME": "/tmp", "PYTHONHASHSEED": "7", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    }
    python = os.path.dirname(os.path.dirname(os.path.realpath(os.path.join(ENGINES, "venv-vllm", "bin", "python"))))
    host = [path for path in ("/usr", "/etc", "/bin", "/lib", "/lib64") if os.path.exists(path)] + [python, ENGINES]
    volumes = [{"name": f"host-{n}", "hostPath": {"path": path, "type": "Directory"}} for n, path in enumerate(host)]
    mounts = [{"name": f"host-{n}", "mountPath": path, "readOnly": True} for n, path in enumerate(host)]
    container = {
        "name": "engine",
        "image": IMAGES["tokenizer-fixture"],  # any image: all files come from the node
        "imagePullPolicy": "Never",
        "command": [os.path.join(ENGINES, "venv-vllm", "bin", "vllm"), "serve", os.path.join(ENGINES, "model")],
        "args": ["--served-model-name", REAL_MODEL, "--host", "0.0.0.0", "--port", "8000", "--enforce-eager", "--max-model-len", "2048",
                 "--max-num-seqs", "8", "--block-size", str(BLOCK), "--num-gpu-blocks-override", "256",
                 "--kv-events-config", json.dumps(publisher), "--enable-prompt-tokens-details"],
        "env": [{"name": key, "value": value} for key, value in environment.items()]
        + [{"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 2},
        "securityContext": RESTRICTED,
        "volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    memory = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    template = {
        "metadata": {"labels": {"app": name, "workload": name}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 5, "volumes": [*volumes, memory, {"name": "tmp", "emptyDir": {}}]},
    }
    spec = {"replicas": replicas, "selector": {"matchLabels": {"workload": name}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def j_real_vllm(steps, ns):
    """(j) real vLLM as pods: its pages, seed and events are seen, and it counts the cached tokens that were predicted"""
    from openai import OpenAI

    if not os.path.exists(os.path.join(ENGINES, "venv-vllm")):
        steps.skip(f"no vLLM in {ENGINES}; e2e/engines/install.sh puts it there")
    # Host paths are for privileged namespaces only; what kvrouter adds keeps to `restricted` there too.
    kubectl("label", "namespace", ns, "pod-security.kubernetes.io/enforce=privileged", "--overwrite")
    with steps.step("two vLLM pods are Ready"):
        apply(vllm("qwen", 2), ns)
        wait("two Ready engines", lambda: sum(map(ready, get("pods", None, ns, "app=qwen"))) == 2, START_SECONDS, 1)
    with steps.step("pool and router are Ready; pages and seed are seen") as notes:
        model = {"name": REAL_MODEL, "tokenizer": {"image": {"reference": IMAGES["real-model"]}}}
        workloads = [{"kind": "Deployment", "name": "qwen"}]
        apply([pool("qwen", model=model, blockSize=BLOCK, workloads=workloads, hashSeed={"policy": "Enforce", "value": 7}), router("front", "qwen")], ns)
        wait_condition("kvrouter", "front", ns, "Ready", "True")
        for kind, name, condition in (("kvpool", "qwen", "Ready"), ("kvpool", "qwen", "PageSizeParity"), ("kvpool", "qwen", "HashSeedStable"),
                                      ("kvrouter", "front", "EventsConnected"), ("kvrouter", "front", "IndexWarm")):
            notes.append(wait_condition(kind, name, ns, condition, "True")[0]["reason"])
    pod, = [pod for pod in router_pods("front", ns) if ready(pod)]
    client = OpenAI(base_url=f"{service_url('front', ns)}/v1", api_key="none", max_retries=0)
    with steps.step("six conversations of three turns: predicted = cached, and every turn stays where its prefix is") as notes:
        hits = 0
        for number in range(6):
            hits += conversation(client, pod, f"guest {number}: ")
        notes.append(f"18 of 18 equal, {hits} cached tokens")
    with steps.step("an engine is deleted: the next turns are served by the other"):
        victim = get("pods", None, ns, "app=qwen")[0]
        kubectl("delete", "pod", victim["metadata"]["name"], "-n", ns, "--grace-period=1", "--wait=false")
        gone = f"{victim['status']['podIP']}:8000"
        wait("the engine leaves the report", lambda: gone not in [w["worker"] for w in report(pod)["workers"] if w["ready"]], 10)
        for number in range(4):
            ask(client, [{"role": "user", "content": f"still there, {number}?"}])
            expect(chosen(receipts(pod, 1)[0]) != gone, "the deleted engine was picked")


def conversation(client, pod, opening):
    """Three turns on one prefix; the cached tokens that vLLM counted in all."""
    messages = [{"role": "system", "content": opening + LONG}]
    where, total = None, 0
    for question in ("When is breakfast?", "And on Sundays?", "Is there coffee?"):
        messages.append({"role": "user", "content": question})
        text, cached = ask(client, messages)
        receipt = receipts(pod, 1)[0]
        expect(receipt["predicted_hit_tokens"] == cached, f"predicted {receipt['predicted_hit_tokens']}, vLLM counted {cached}")
        if where:
            expect(chosen(receipt) == where, f"the turn before went to {where}, this one to {chosen(receipt)}")
            expect(cached > 0, "vLLM counted no cached tokens")
        where, total = chosen(receipt), total + cached
        messages.append({"role": "assistant", "content": text})
        time.sleep(THINK_SECONDS)
    return total


def ask(client, messages):
    """The answer's text and the cached tokens that the engine counted."""
    answer = client.chat.completions.create(model=REAL_MODEL, messages=messages, max_tokens=16)
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].message.content, (details.cached_tokens if details else 0) or 0
