"""What all scenarios share: commands, waiting, steps with their times, a namespace with engines, a client.

Owns no expectation. Everything runs as the user of KUBECONFIG, on a machine from which pod and Service addresses
are reachable (`e2e/cluster/exec.sh` sees to that).
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
SYSTEM = "kvrouter-system"
MODEL = "sim-model"
# The demo stays up: nothing is deleted at the end.
KEEP = bool(os.environ.get("KVROUTER_E2E_KEEP"))
TAG = os.environ.get("KVROUTER_E2E_TAG", "e2e")
IMAGES = {name: f"kvrouter.local/{name}:{TAG}" for name in ("kv-router", "kv-router-operator", "engine-sim", "nats-server", "tokenizer-fixture", "real-model")}


class Failed(Exception):
    """An expectation that did not hold; the message says which and what was seen."""


def run(*command, stdin=None, check=True, timeout=120):
    """Runs a command and gives its output; a failure shows the command and what it wrote."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout)
    if check and done.returncode != 0:
        raise Failed(f"`{' '.join(command)}` exited {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout if check else done


def kubectl(*args, **options):
    return run("kubectl", *args, **options)


def get(kind, name=None, namespace=None, selector=None):
    """An object, or the items of a list, as the API server has them."""
    args = ["get", kind, "-o", "json"]
    if name:
        args.append(name)
    if namespace:
        args += ["-n", namespace]
    if selector:
        args += ["-l", selector]
    value = json.loads(kubectl(*args))
    return value if name else value["items"]


def apply(manifest, namespace=None):
    """Applies one object or a list of them."""
    items = manifest if isinstance(manifest, list) else [manifest]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    kubectl("apply", "-f", "-", *(["-n", namespace] if namespace else []), stdin=text)


def wait(what, probe, timeout=90, pause=0.25):
    """Waits until `probe()` gives something true and returns it with the seconds it took.

    A probe may raise or return None while it is too early; the last reason is shown on a time-out.
    """
    began = time.monotonic()
    reason = "never true"
    while True:
        try:
            value = probe()
            if value:
                return value, time.monotonic() - began
        except (Failed, OSError, ValueError, KeyError, IndexError) as error:
            reason = str(error)
        if time.monotonic() - began > timeout:
            raise Failed(f"waited {timeout} s for: {what} ({reason})")
        time.sleep(pause)


def expect(condition, message):
    if not condition:
        raise Failed(message)


def conditions(kind, name, namespace):
    status = get(kind, name, namespace).get("status", {})
    return {condition["type"]: condition for condition in status.get("conditions", [])}


def wait_condition(kind, name, namespace, type_, status, reason=None, mentions=None, timeout=120):
    """Waits until a condition has this status (and reason, and names all of `mentions`)."""

    def probe():
        seen = conditions(kind, name, namespace).get(type_)
        if seen is None:
            raise Failed(f"{type_} is absent")
        named = all(word in seen["message"] for word in mentions or [])
        if seen["status"] == status and (reason is None or seen["reason"] == reason) and named:
            return seen
        raise Failed(f"{type_}={seen['status']} {seen['reason']}: {seen['message']}")

    return wait(f"{kind}/{name} {type_}={status} {reason or ''}", probe, timeout)


class Steps:
    """Prints every step of a scenario with the seconds it took."""

    @contextlib.contextmanager
    def step(self, what):
        began = time.monotonic()
        notes = []
        try:
            yield notes
        except BaseException:
            print(f"   {time.monotonic() - began:6.1f} s  {what}: FAILED", flush=True)
            raise
        tail = f": {'; '.join(notes)}" if notes else ""
        print(f"   {time.monotonic() - began:6.1f} s  {what}{tail}", flush=True)


# ---- manifests ----------------------------------------------------------------------------------------------------

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def namespace(name):
    """A namespace in which only restricted pods may run."""
    apply({"apiVersion": "v1", "kind": "Namespace",
           "metadata": {"name": name, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}})
    return name


def engines(name, replicas=2, page_size=16, app="qwen", seed=None, ranks=1, wire="vllm-0.22", labels=None, arguments=()):
    """A Deployment of simulated engines, as a user would write it. `app` is the label that pools select, `ranks` the
    data-parallel ranks of each pod, `labels` and `arguments` are more of both."""
    env = [] if seed is None else [{"name": "PYTHONHASHSEED", "value": str(seed)}]
    container = {
        "name": "engine",
        "image": IMAGES["engine-sim"],
        "imagePullPolicy": "Never",
        "args": ["--listen", "0.0.0.0:8000", "--model", MODEL, "--tokenizer", "/tokenizer", "--page-size", str(page_size), "--dp-size", str(ranks),
                 "--kv-events-port", "5557", "--replay-port", "5657", "--wire", wire, *arguments],
        "env": env,
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
        "securityContext": RESTRICTED,
        "volumeMounts": [{"name": "tokenizer", "mountPath": "/tokenizer", "readOnly": True}],
    }
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": {"workload": name}},
        "template": {
            "metadata": {"labels": {"app": app, "workload": name, **(labels or {})}},
            "spec": {
                "containers": [container],
                "terminationGracePeriodSeconds": 3,
                "volumes": [{"name": "tokenizer", "image": {"reference": IMAGES["tokenizer-fixture"], "pullPolicy": "Never"}}],
            },
        },
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def pool(name, app="qwen", transport="ZMQ", **spec):
    """A pool over the engines that carry `app`."""
    events = {"transport": transport, **spec.pop("kvEvents", {})}
    return {
        "apiVersion": "kvrouter.dev/v1alpha1", "kind": "InferencePool", "metadata": {"name": name},
        "spec": {
            "model": {"name": MODEL, "tokenizer": {"image": {"reference": IMAGES["tokenizer-fixture"]}}},
            "selector": {"matchLabels": {"app": app}},
            "targetPorts": [{"number": 8000}],
            "kvEvents": events,
            **spec,
        },
    }


def router(name, pool_name, replicas=1, **spec):
    """A router in front of a pool."""
    return {
        "apiVersion": "kvrouter.dev/v1alpha1", "kind": "KvRouter", "metadata": {"name": name},
        "spec": {"replicas": replicas, "poolRef": {"name": pool_name}, "imagePullPolicy": "Never",
                 "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}, **spec},
    }


# ---- reaching a router --------------------------------------------------------------------------------------------

def service_url(name, namespace_):
    """Base URL of a router's Service, by its cluster address, once connections reach a router.

    Nodes learn of a Ready pod a second or more after the API server does; until then the address refuses connections.
    """
    service = get("service", f"{name}-router", namespace_)
    url = f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"
    wait(f"an answer of {url}", lambda: http(f"{url}/v1/models")[0] == 200, 15)
    return url


def router_pods(name, namespace_):
    return [pod for pod in get("pods", None, namespace_, f"kvrouter.dev/router={name}") if "deletionTimestamp" not in pod["metadata"]]


def ready(pod):
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod.get("status", {}).get("conditions", []))


def http(url, body=None, headers=None, timeout=30):
    """Status, headers and parsed body of a request; never raises for a status."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, dict(answer.headers), json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        with contextlib.suppress(ValueError):
            text = json.loads(text)
        return error.code, dict(error.headers), text


def report(pod):
    """A router's own health report."""
    return http(f"http://{pod['status']['podIP']}:9090/health/report")[2]


@contextlib.contextmanager
def admin(pod):
    """Base URL of a router's admin port, which listens on loopback inside the pod."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meta = pod["metadata"]
    forward = subprocess.Popen(["kubectl", "-n", meta["namespace"], "port-forward", meta["name"], f"{port}:9091"],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        line = forward.stdout.readline()
        expect("Forwarding" in line, f"port-forward to {meta['name']}: {line}")
        threading.Thread(target=forward.stdout.read, daemon=True).start()
        yield f"http://127.0.0.1:{port}"
    finally:
        forward.terminate()
        forward.wait(10)


def receipts(pod, limit=50):
    with admin(pod) as url:
        return http(f"{url}/v1/admin/receipts?limit={limit}")[2]["receipts"]


def chosen(receipt):
    """`host:port` of the worker that a receipt chose."""
    expect(receipt["chosen"], f"nobody was chosen: {receipt['outcome']}")
    return receipt["chosen"]["target"].partition("#")[0]


LONG = "You are the assistant of a hotel. Rooms are cleaned at ten; breakfast is from seven. " * 40


def chat(url, question, history=(), stream=False, max_tokens=8, timeout=30):
    """One chat through `url` in plain HTTP; returns status and body."""
    messages = [{"role": "system", "content": LONG}, *history, {"role": "user", "content": question}]
    return http(f"{url}/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "stream": stream},
                timeout=timeout)[::2]


class Load:
    """Streams chats through a URL from several threads until stopped; counts whole, refused and truncated ones."""

    def __init__(self, url, threads=6, max_tokens=40):
        self.url, self.max_tokens = url, max_tokens
        self.whole, self.errors = 0, []
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self._work, args=(n,), daemon=True) for n in range(threads)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        for thread in self.threads:
            thread.join(60)

    def _work(self, number):
        turn = 0
        while not self.stopping.is_set():
            turn += 1
            error = self._one(f"question {number}.{turn}")
            with self.lock:
                if error:
                    self.errors.append(error)
                else:
                    self.whole += 1

    def _one(self, question):
        """None for a stream that came to its end, else what went wrong."""
        messages = [{"role": "system", "content": LONG}, {"role": "user", "content": question}]
        body = {"model": MODEL, "messages": messages, "max_tokens": self.max_tokens, "stream": True}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read().decode()
        except Exception as error:  # http.client's own errors have no common base but Exception
            return f"{type(error).__name__}: {error}"
        if not text.rstrip().endswith("data: [DONE]") or '\ndata: {"error"' in text:
            return f"truncated after {len(text)} bytes: …{text[-200:]!r}"
        return None


def log(text):
    print(text, file=sys.stderr, flush=True)
