"""Scenarios (a) to (i), (k) and (q): what a platform engineer does, and what kvrouter must then show. (a) installs the chart that
the others use; each runs in a namespace of its own. Docstrings are the titles that the runner prints.
"""

import json
import os
import re
import time
import urllib.request

from lib import (
    IMAGES, KEEP, LONG, MODEL, ROOT, SYSTEM, Failed, Load, admin, apply, chat, chosen, conditions, engines, expect, get, http,
    kubectl, pool, ready, receipts, report, router, router_pods, run, service_url, wait, wait_condition,
)

SAMPLES = os.path.join(ROOT, "config", "samples", "simulated")


def install(steps, upgrade=False):
    """Installs the chart, or upgrades it to other images, and waits for the operator."""
    suffix = "-upgraded" if upgrade else ""
    values = [
        "--set", f"operator.image={IMAGES['kv-router-operator']}{suffix}",
        "--set", f"router.image={IMAGES['kv-router']}{suffix}",
        "--set", f"nats.image={IMAGES['nats-server']}",
        "--set", "imagePullPolicy=Never",
    ]
    with steps.step("helm upgrade" if upgrade else "helm install"):
        run("helm", "upgrade", "--install", "kvrouter", os.path.join(ROOT, "charts", "kvrouter"), "-n", SYSTEM,
            "--create-namespace", "--wait", "--timeout", "60s", *values, timeout=90)


def serve(steps, ns, engines_=None, pool_=None, router_=None):
    """Engines, a pool and a router, up to Ready; gives the router's URL."""
    with steps.step("engines, pool and router are Ready") as notes:
        apply([*(engines_ or [engines("qwen")]), pool_ or pool("qwen"), router_ or router("front", "qwen")], ns)
        wait_condition("kvrouter", "front", ns, "Ready", "True")
        wait_condition("kvpool", "qwen", ns, "Ready", "True")
        notes.append(kubectl("get", "kvr", "front", "-n", ns, "--no-headers").strip())
    return service_url("front", ns)


def wait_ready_workers(ns, count, timeout=60, ranks=1):
    """Waits until every router of `front` may pick `count` workers, all of their ranks with credit."""

    def probe():
        pods = [pod for pod in router_pods("front", ns) if ready(pod)]
        for pod in pods:
            workers = [worker for worker in report(pod)["workers"] if worker["ready"]]
            targets = [target for worker in workers for target in worker["targets"]]
            if len(workers) != count or len(targets) != count * ranks or not all(target["credited"] for target in targets):
                raise Failed(f"{pod['metadata']['name']} sees {workers}")
        return pods

    return wait(f"{count} credited workers", probe, timeout)


def sdk_chat(url, messages):
    """A chat with the official SDK; the answer's text and the cached tokens that the engine reports."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16)
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].message.content, (details.cached_tokens if details else 0) or 0


def a_install_and_talk(steps, ns):
    """(a) helm install, kubectl apply, a conversation with the OpenAI SDK stays where its prefix is"""
    install(steps)
    with steps.step("kubectl apply -f config/samples/simulated; both Ready"):
        kubectl("apply", "-n", ns, "-f", SAMPLES)
        kubectl("wait", "-n", ns, "--for=condition=Ready", "kvrouter/sim", "kvpool/sim", "--timeout=120s", timeout=150)
    pod, = [pod for pod in router_pods("sim", ns) if ready(pod)][:1]
    url = f"http://{pod['status']['podIP']}:8000"
    with steps.step("turn two lands on turn one's worker, with cached tokens") as notes:
        messages = [{"role": "system", "content": LONG}, {"role": "user", "content": "When is breakfast?"}]
        answer, _ = sdk_chat(url, messages)
        first = chosen(receipts(pod, 1)[0])
        for number in range(3):
            chat(url, f"something else {number}")
        wait("turn one in the view", lambda: block_count(pod, first) > 0, 20)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And when is my room cleaned?"}]
        _, cached = sdk_chat(url, messages)
        second = receipts(pod, 1)[0]
        expect(chosen(second) == first, f"turn one went to {first}, turn two to {chosen(second)}")
        expect(cached > 0, "the engine reports no cached tokens")
        expect(second["predicted_hit_tokens"] == cached, f"predicted {second['predicted_hit_tokens']}, the engine says {cached}")
        notes.append(f"{cached} tokens cached, as predicted, on {first}")
    with steps.step("the Service answers, the cache view agrees"):
        status, _ = chat(service_url("sim", ns), "Hello")
        expect(status == 200, f"the Service answered {status}")
        expect(block_count(pod, first) > 0, "the cache view of the chosen worker is empty")
    with steps.step("kubectl get kvr,kvpool") as notes:
        notes.append("\n" + kubectl("get", "kvr,kvpool", "-n", ns, "-o", "wide"))
    if not KEEP:
        with steps.step("a namespace that is deleted takes everything along"):
            kubectl("delete", "namespace", ns, "--wait=true", timeout=120)


def block_count(pod, worker):
    with admin(pod) as url:
        return http(f"{url}/v1/admin/cache-view/{worker}")[2]["block_count"]


def b_engine_killed(steps, ns):
    """(b) an engine pod is killed: it leaves the picks within a second, conditions and events follow, then it heals"""
    url = serve(steps, ns, [engines("qwen", replicas=3)])
    (pod, *_), _ = wait_ready_workers(ns, 3)
    chat(url, "warm up")
    victim_address = chosen(receipts(pod, 1)[0])
    victim = next(p for p in get("pods", None, ns, "app=qwen") if victim_address.startswith(f"{p['status']['podIP']}:"))
    name = victim["metadata"]["name"]
    with steps.step(f"kubectl delete pod {name}: no longer a candidate") as notes:
        known = time.monotonic()
        kubectl("delete", "pod", name, "-n", ns, "--grace-period=1", "--wait=false")
        wait("the worker leaves the report", lambda: victim_address not in [w["worker"] for w in report(pod)["workers"] if w["ready"]], 10, 0.05)
        seconds = time.monotonic() - known
        expect(seconds < 1.5, f"it stayed a candidate for {seconds:.1f} s")
        notes.append(f"after {seconds:.2f} s")
    with steps.step("the next turn goes elsewhere and is served"):
        status, _ = chat(url, "warm up")
        expect(status == 200, f"status {status}")
        expect(chosen(receipts(pod, 1)[0]) != victim_address, "the dead worker was picked")
    with steps.step("an event of the pool or the router tells it"):
        def told():
            mine = [e for e in get("events.events.k8s.io", None, ns) if e["regarding"].get("apiVersion") == "kvrouter.dev/v1alpha1"]
            return [e for e in mine if e.get("reportingController", "").startswith("kvrouter")]

        wait("an event", told, 60)
    with steps.step("its successor joins"):
        wait_ready_workers(ns, 3)
        wait_condition("kvpool", "qwen", ns, "Ready", "True")


def c_other_page_size(steps, ns):
    """(c) a pod with another page size joins: PageSizeParity names it"""
    serve(steps, ns)
    apply(engines("odd", replicas=1, page_size=32), ns)
    odd, _ = wait("the odd pod", lambda: next((p for p in get("pods", None, ns, "workload=odd") if ready(p)), None))
    name = odd["metadata"]["name"]
    with steps.step("PageSizeParity=False names the pod; Degraded, still Ready") as notes:
        seen, _ = wait_condition("kvpool", "qwen", ns, "PageSizeParity", "False", mentions=[name])
        wait_condition("kvpool", "qwen", ns, "Degraded", "True")
        expect(conditions("kvpool", "qwen", ns)["Ready"]["status"] == "True", "the pool is not Ready")
        notes.append(seen["message"])
    with steps.step("RequireParity keeps it out of the picks"):
        kubectl("patch", "kvpool", "qwen", "-n", ns, "--type=merge", "-p", '{"spec":{"pageSizePolicy":"RequireParity"}}')
        address = f"{odd['status']['podIP']}:8000"

        def excluded():
            for pod in router_pods("front", ns):
                worker = next(w for w in report(pod)["workers"] if w["worker"] == address)
                if worker["ready"] or worker["reason"] != "page_size":
                    raise Failed(f"{address} is ready={worker['ready']} {worker['reason']}")
            return True

        wait("the odd worker is excluded", excluded, 30)
    with steps.step("without it parity is back"):
        kubectl("delete", "deployment", "odd", "-n", ns)
        wait_condition("kvpool", "qwen", ns, "PageSizeParity", "True")


def seeds(ns, selector):
    """PYTHONHASHSEED of the running engine containers, by pod."""
    found = {}
    for pod in get("pods", None, ns, selector):
        if "deletionTimestamp" not in pod["metadata"]:
            env = pod["spec"]["containers"][0].get("env", [])
            found[pod["metadata"]["uid"]] = next((e.get("value") for e in env if e["name"] == "PYTHONHASHSEED"), None)
    return found


def d_hash_seed(steps, ns):
    """(d) PYTHONHASHSEED is set on a named Deployment, once, and nothing of ours restarts engines again"""
    spec = {"workloads": [{"kind": "Deployment", "name": "qwen"}], "hashSeed": {"policy": "Enforce", "value": 7}}
    with steps.step("the running pods have the seed"):
        apply([engines("qwen"), pool("qwen", **spec), router("front", "qwen")], ns)

        def seeded():
            found = seeds(ns, "app=qwen")
            if set(found.values()) != {"7"} or len(found) != 2:
                raise Failed(f"seeds {found}")
            return found

        found, _ = wait("seed 7 in both pods", seeded, 120)
        wait_condition("kvpool", "qwen", ns, "HashSeedStable", "True", "SeedSet")
    for what, act in (
        ("a second reconcile", lambda: kubectl("annotate", "kvpool", "qwen", "-n", ns, f"test/touched={time.time()}", "--overwrite")),
        ("an operator restart", restart_operator),
        ("an operator upgrade", lambda: upgrade_operator(steps)),
    ):
        with steps.step(f"{what} restarts no engine"):
            act()
            time.sleep(4)
            expect(seeds(ns, "app=qwen").keys() == found.keys(), f"{what} replaced engine pods")
    with steps.step("a value that the user set is left alone and named"):
        apply(engines("own", seed=3), ns)
        kubectl("patch", "kvpool", "qwen", "-n", ns, "--type=merge", "-p", json.dumps(
            {"spec": {"workloads": [{"kind": "Deployment", "name": "qwen"}, {"kind": "Deployment", "name": "own"}]}}))
        wait_condition("kvpool", "qwen", ns, "HashSeedStable", "False", "SeedDiffers")
        expect(set(seeds(ns, "workload=own").values()) == {"3"}, "the user's value was overwritten")


def restart_operator():
    kubectl("rollout", "restart", "deployment", "-n", SYSTEM, "-l", "app.kubernetes.io/name=kv-router-operator")
    kubectl("rollout", "status", "deployment", "-n", SYSTEM, "-l", "app.kubernetes.io/name=kv-router-operator", "--timeout=60s")


def upgrade_operator(steps):
    """Other images of operator, routers and bridges: routers roll, engines must not."""
    install(steps, upgrade=True)


def e_live_edit_and_rollout(steps, ns):
    """(e) weights change live; a new image rolls without a truncated stream under load"""
    url = serve(steps, ns, [engines("qwen", ranks=2)], pool("qwen", dpSize=2), router("front", "qwen", replicas=2))
    wait_ready_workers(ns, 2, ranks=2)
    before = {pod["metadata"]["uid"] for pod in router_pods("front", ns)}
    with steps.step("a weight edit reaches every router in under 3 s, without a restart") as notes:
        edited = time.monotonic()
        kubectl("patch", "kvr", "front", "-n", ns, "--type=merge", "-p", '{"spec":{"overlapWeights":{"default":3.5}}}')

        def applied():
            wanted = get("kvrouter", "front", ns)["status"]["configHash"].split("/")[1]
            return all(report(pod)["config"]["live"] == wanted for pod in router_pods("front", ns)) and weights(ns) == {3.5}

        wait("3.5 in all routers", applied, 15, 0.1)
        seconds = time.monotonic() - edited
        expect(seconds < 3, f"it took {seconds:.1f} s")
        notes.append(f"{seconds:.1f} s")
        expect({pod["metadata"]["uid"] for pod in router_pods("front", ns)} == before, "routers were restarted")
        wait_condition("kvrouter", "front", ns, "ConfigApplied", "True")
    with steps.step("another image rolls under load, no stream is cut") as notes:
        with Load(url) as load:
            wait("some answers", lambda: load.whole > 20, 30)
            kubectl("patch", "kvr", "front", "-n", ns, "--type=merge", "-p", json.dumps({"spec": {"image": f"{IMAGES['kv-router']}-next"}}))

            def rolled():
                pods = router_pods("front", ns)
                images = {pod["spec"]["containers"][0]["image"] for pod in pods}
                uids = {pod["metadata"]["uid"] for pod in pods}
                return images == {f"{IMAGES['kv-router']}-next"} and not uids & before and all(map(ready, pods)) and len(pods) == 2

            wait("both routers replaced", rolled, 120)
            at_roll = load.whole
            wait("answers after the rollout", lambda: load.whole > at_roll + 20, 30)
        expect(not load.errors, f"{len(load.errors)} streams failed, first: {load.errors[:1]}")
        notes.append(f"{load.whole} streams whole")


def weights(ns):
    """The overlap weights that receipts of fresh decisions were made with."""
    found = set()
    for pod in router_pods("front", ns):
        chat(f"http://{pod['status']['podIP']}:8000", "which weight")
        found.add(receipts(pod, 1)[0]["settings"]["overlap"]["default"])
    return found


def f_nats_killed(steps, ns):
    """(f) the broker is killed and comes back: requests go on, conditions say so and recover"""
    spec = {"workloads": [{"kind": "Deployment", "name": "qwen"}], "kvEvents": {"bridge": "Inject"}, "dpSize": 2}
    url = serve(steps, ns, [engines("qwen", ranks=2)], pool("qwen", transport="NATS", **spec))
    with steps.step("both ranks of both engines are heard"):
        wait_ready_workers(ns, 2, ranks=2)
    broker = ("-n", SYSTEM, "deployment", "-l", "app.kubernetes.io/component=nats")
    with Load(url, threads=2) as load:
        with steps.step("broker gone: EventsConnected=False, requests go on"):
            kubectl("scale", *broker, "--replicas=0")
            wait_condition("kvrouter", "front", ns, "EventsConnected", "False", "NatsUnreachable", timeout=120)
            expect(conditions("kvrouter", "front", ns)["Ready"]["status"] == "True", "the router is not Ready")
            whole = load.whole
            wait("answers without a broker", lambda: load.whole > whole + 5, 30)
        with steps.step("broker back: conditions recover, views are credited again"):
            kubectl("scale", *broker, "--replicas=1")
            wait_condition("kvrouter", "front", ns, "EventsConnected", "True", timeout=120)
            wait_ready_workers(ns, 2, ranks=2)
    expect(not load.errors, f"{len(load.errors)} requests failed, first: {load.errors[:1]}")


def g_api_server_killed(steps, ns):
    """(g) the API server is killed and comes back: routing goes on"""
    script = os.environ.get("KVROUTER_E2E_APISERVER")
    url = serve(steps, ns)
    wait_ready_workers(ns, 2)
    if not script:
        steps.skip("this cluster's API server is not ours to kill")
        return
    with Load(url, threads=2) as load:
        with steps.step("API server down for 20 s: every request is served") as notes:
            run(script, "stop")
            whole = load.whole
            time.sleep(20)
            expect(load.whole > whole + 20, f"only {load.whole - whole} answers in 20 s")
            notes.append(f"{load.whole - whole} answers")
            run(script, "start", timeout=60)
        with steps.step("it is back: a new engine is found, conditions hold") as notes:
            wait("the API", lambda: kubectl("get", "--raw", "/readyz"), 60)
            kubectl("scale", "deployment", "qwen", "-n", ns, "--replicas=3")
            # Kubernetes' own controllers take up to a minute to come back.
            kubectl("rollout", "status", "deployment/qwen", "-n", ns, "--timeout=150s", timeout=160)
            _, seconds = wait_ready_workers(ns, 3, 30)
            notes.append(f"found {seconds:.1f} s after it was Ready")
            wait_condition("kvrouter", "front", ns, "Ready", "True")
    expect(not load.errors, f"{len(load.errors)} requests failed, first: {load.errors[:1]}")


def h_drain(steps, ns):
    """(h) a node is drained: routers and engines move, no stream is cut"""
    nodes = [node["metadata"]["name"] for node in get("nodes")]
    if len(nodes) < 2:
        steps.skip("one node only")
        return
    url = serve(steps, ns, [engines("qwen", replicas=4)], router_=router("front", "qwen", replicas=2))
    wait_ready_workers(ns, 4)
    node = max(nodes, key=lambda n: sum(p["spec"].get("nodeName") == n for p in router_pods("front", ns)))
    try:
        with steps.step(f"kubectl drain {node}"):
            kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s", timeout=150)
        with steps.step("everything is Ready on the other node"):
            wait_ready_workers(ns, 4, 120)
            wait_condition("kvrouter", "front", ns, "RouterAvailable", "True")
            expect(chat(url, "still there?")[0] == 200, "no answer after the drain")
    finally:
        kubectl("uncordon", node)


def i_delete_everything(steps, ns):
    """(i) everything is deleted in an arbitrary order and uninstalled: nothing is left"""
    serve(steps, ns)
    with steps.step("pool first, then the router, then the chart"):
        kubectl("delete", "kvpool", "qwen", "-n", ns, "--wait=true", timeout=60)
        wait_condition("kvrouter", "front", ns, "ResolvedRefs", "False", "PoolNotFound")
        expect(chat(service_url("front", ns), "still serving?")[0] == 200, "routers stopped when the pool went")
        kubectl("delete", "kvr", "front", "-n", ns, "--wait=true", timeout=60)
        wait("no children", lambda: not children(ns), 60)
        run("helm", "uninstall", "kvrouter", "-n", SYSTEM, "--wait", timeout=120)
        kubectl("delete", "namespace", SYSTEM, "--wait=true", timeout=120)
    with steps.step("CRDs are kept, then deleted; the cluster is as before"):
        crds = [c["metadata"]["name"] for c in get("customresourcedefinitions") if c["metadata"]["name"].endswith(".kvrouter.dev")]
        expect(len(crds) == 2, f"CRDs after uninstall: {crds}")
        kubectl("delete", "crd", *crds, "--wait=true", timeout=60)
        for kind in ("clusterroles", "clusterrolebindings"):
            left = [o["metadata"]["name"] for o in get(kind) if "kvrouter" in o["metadata"]["name"]]
            expect(not left, f"{kind} left: {left}")


def half(role, replicas=2):
    """Engines of one half, which hand over at SGLang's usual port and give up soon."""
    return engines(role, replicas=replicas, wire="sglang-0.5.23", labels={"role": role},
                   arguments=["--disaggregation", role, "--transfer-port", "8998", "--transfer-timeout-ms", "5000"])


def handovers(ns):
    """What engines counted of their handovers, summed, and everything that somebody got wrong."""
    totals, wrong = {}, {}
    for pod in get("pods", None, ns, "app=qwen"):
        if "deletionTimestamp" in pod["metadata"] or not ready(pod):
            continue
        told = http(f"http://{pod['status']['podIP']}:8000/sim/state")[2]["handover"]
        for sums, counts in ((totals, told["total"]), (wrong, told["wrong"])):
            for name, count in counts.items():
                sums[name] = sums.get(name, 0) + count
    return totals, wrong


def metric(pod, name):
    """The sum of a router's metric over its labels, and how many there are."""
    with urllib.request.urlopen(f"http://{pod['status']['podIP']}:9090/metrics", timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines), len(lines)


def k_prefill_and_decode(steps, ns):
    """(k) prefill and decode pods: pairs serve every request, demand is seen, a missing half is named and comes back"""
    roles = [{"name": name, "protocol": "SGLang", "selector": {"matchLabels": {"role": name.lower()}}} for name in ("Prefill", "Decode")]
    url = serve(steps, ns, [half("prefill"), half("decode")], pool("qwen", engine="SGLang", roles=roles),
                router("front", "qwen", decodeInputDemand={"mode": "Enabled"}, pdPrefillGuardRelease="Completion"))
    with steps.step("the router sees two of each"):
        def paired():
            pod, = (pod for pod in router_pods("front", ns) if ready(pod))
            seen = sorted(worker["role"] for worker in report(pod)["workers"] if worker["ready"])
            expect(seen == ["decode", "decode", "prefill", "prefill"], f"{seen}")
            return pod

        pod, _ = wait("two of each", paired, 60)
    with steps.step("eight requests, streamed or not, are served by pairs; a repeated prompt is found in prefill's cache") as notes:
        for number in range(8):
            status, body = chat(url, f"question {number}")
            expect(status == 200, f"status {status}: {body}")
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        expect(cached > 0, f"no cached tokens: {body['usage']}")
        with Load(url, threads=2) as load:
            wait("streams", lambda: load.whole >= 8, 60)
        expect(not load.errors, f"{load.errors[:3]}")
        totals, wrong = handovers(ns)
        served = 8 + load.whole
        expect(totals == {"offered": served, "taken": served, "received": served}, f"{served} requests: {totals}")
        expect(not wrong, f"{wrong}")
        notes.append(f"{served} handovers, {cached} cached tokens")
    with steps.step("decode demand was counted for each of them and nothing of it is left") as notes:
        decided, _ = metric(pod, "kvrouter_decode_demand_decisions_total")
        expect(decided >= served, f"{decided} decisions of {served} requests")
        wait("no demand", lambda: metric(pod, "kvrouter_decode_demand_tokens")[0] == 0, 10)
        notes.append(f"{decided:.0f} decisions")
    with steps.step("without decode pods: the pool is not Ready, the router Degraded, both say NoDecodeReady") as notes:
        kubectl("scale", "deployment", "decode", "-n", ns, "--replicas=0")
        seen, seconds = wait_condition("kvpool", "qwen", ns, "Ready", "False", "NoDecodeReady", mentions=["role=decode"])
        wait_condition("kvrouter", "front", ns, "Degraded", "True", "NoDecodeReady")
        status, body = chat(url, "nobody decodes")
        expect(status == 503, f"status {status}: {body}")
        notes.append(f"after {seconds:.0f} s: {seen['message']}")
    with steps.step("they come back, and so does everything"):
        kubectl("scale", "deployment", "decode", "-n", ns, "--replicas=1")
        wait_condition("kvpool", "qwen", ns, "Ready", "True")
        wait("an answer", lambda: chat(url, "back again")[0] == 200, 30)
        wait_condition("kvrouter", "front", ns, "Degraded", "False")


def children(ns):
    kinds = "deployments,services,configmaps,serviceaccounts,rolebindings,poddisruptionbudgets"
    return [f"{o['kind']}/{o['metadata']['name']}" for o in get(kinds, None, ns, "app.kubernetes.io/managed-by=kvrouter-operator")]


WRITES = ("POST", "PUT", "PATCH", "APPLY", "DELETE")
OURS = ("kvinferencepools", "kvrouters", "deployments", "configmaps", "services", "serviceaccounts", "rolebindings", "poddisruptionbudgets")


def writes():
    """Writes that the API server has counted of what the operator owns; its Lease is renewed all the time and no part of it."""
    total = 0
    for line in kubectl("get", "--raw", "/metrics").splitlines():
        if line.startswith("apiserver_request_total{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            if labels["verb"] in WRITES and labels["resource"] in OURS:
                total += int(float(line.rsplit(" ", 1)[1]))
    return total


def q_quiet(steps, ns):
    """(q) five quiet minutes under traffic: the operator writes nothing and stays under 64 MiB"""
    url = serve(steps, ns, [engines("qwen", replicas=3)], router_=router("front", "qwen", replicas=2))
    with Load(url, threads=1), steps.step("0 writes in 300 s") as notes:
        time.sleep(45)  # the window after which observed conditions have settled
        before = writes()
        time.sleep(300)
        expect(writes() == before, f"{writes() - before} writes")
        # Nodes on this machine: their processes are ours to see.
        resident = run("ps", "-C", "kv-router-opera", "-o", "rss=", check=False).stdout.split()
        if resident:
            most = max(map(int, resident)) / 1024
            expect(most < 64, f"the operator has {most:.0f} MiB")
            notes.append(f"operator {most:.1f} MiB")


SCENARIOS = {
    "a": a_install_and_talk, "b": b_engine_killed, "c": c_other_page_size, "d": d_hash_seed, "e": e_live_edit_and_rollout,
    "f": f_nats_killed, "g": g_api_server_killed, "h": h_drain, "k": k_prefill_and_decode, "q": q_quiet, "i": i_delete_everything,
}
