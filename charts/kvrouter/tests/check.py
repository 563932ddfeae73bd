#!/usr/bin/env python3
"""Renders the chart with several values and checks what must hold whatever they are.

Needs helm and kubectl, and no cluster: kubectl turns what helm renders into JSON, so that no YAML library is needed.
What is rendered from values/*.yaml is compared with expected/*.yaml; UPDATE_EXPECT=1 writes these anew.
"""

import json
import os
import pathlib
import subprocess
import sys

TESTS = pathlib.Path(__file__).resolve().parent
CHART = TESTS.parent
ROOT = CHART.parent.parent
DEFINITIONS = {"kvinferencepools.kvrouter.dev", "kvrouters.kvrouter.dev"}

failures = []
checks = 0


def check(why, good, found=""):
    """One claim about the chart."""
    global checks
    checks += 1
    if not good:
        failures.append(f"{why}{': ' if found else ''}{found}")


def run(command, stdin=None):
    environment = {**os.environ, "KUBECONFIG": os.devnull}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, check=False)


def helm(*arguments):
    """`helm template` of the chart; the process that ended."""
    return run(["helm", "template", "kvrouter", str(CHART), "--namespace", "kvrouter-system",
                "--api-versions", "monitoring.coreos.com/v1", *arguments])


def must(process):
    if process.returncode != 0:
        sys.exit(f"chart: {' '.join(map(str, process.args))}\n{process.stderr}")
    return process.stdout


def objects(text):
    """Parses manifests: kubectl changes nothing but one annotation, and never asks a server."""
    stream = must(run(["kubectl", "annotate", "--local", "--overwrite", "-f", "-", "-o", "json", "read=1"], text)).strip()
    found, decoder = [], json.JSONDecoder()
    while stream:
        value, end = decoder.raw_decode(stream)
        found += value["items"] if value["kind"] == "List" else [value]
        stream = stream[end:].lstrip()
    return found


def of_kind(rendered, *kinds):
    return [it for it in rendered if it["kind"] in kinds]


def name(it):
    return f'{it["kind"]}/{it["metadata"].get("namespace", "")}/{it["metadata"]["name"]}'


def rules(rendered):
    for role in of_kind(rendered, "Role", "ClusterRole"):
        for rule in role["rules"]:
            yield role, rule


def pod_specs(rendered):
    for it in rendered:
        if it["kind"] == "Pod":
            yield name(it), it["spec"]
        elif "template" in it.get("spec", {}):
            yield name(it), it["spec"]["template"]["spec"]


def writes(rule, resource):
    return resource in rule["resources"] and set(rule["verbs"]) - {"get", "list", "watch"}


def check_rights(label, rendered, patching):
    """No Secret, no wildcard, one role to bind, workloads only where they may be patched."""
    patched = False
    for role, rule in rules(rendered):
        where = f"{label}: {name(role)}: {rule}"
        check("nobody may touch Secrets", "secrets" not in rule["resources"], where)
        check("no wildcards", "*" not in rule["resources"] + rule["verbs"] + rule["apiGroups"], where)
        check("nobody may escalate or impersonate", not {"escalate", "impersonate"} & set(rule["verbs"]), where)
        check("roles are bound by name only",
              "bind" not in rule["verbs"] or (rule["resources"], rule.get("resourceNames")) == (["clusterroles"], ["kvrouter-router"]), where)
        check("specs of ours are the user's", not any(writes(rule, it) for it in ("kvinferencepools", "kvrouters")), where)
        check("pods are only read", not writes(rule, "pods"), where)
        check("pools of the Gateway API are only read", not any(writes(rule, it) for it in ("inferencepools", "inferencepools/status")), where)
        check("definitions are only read", not writes(rule, "customresourcedefinitions"), where)
        check("StatefulSets are patched at most", (writes(rule, "statefulsets") or set()) <= {"patch"}, where)
        patched |= bool(writes(rule, "statefulsets"))
    check("StatefulSets may be patched exactly with workloadPatching", patched == patching, label)
    router = [it for it in of_kind(rendered, "ClusterRole") if it["metadata"]["name"] == "kvrouter-router"]
    check("the routers' role is there", len(router) == 1, label)
    check("routers only read", all(set(rule["verbs"]) == {"get", "list", "watch"} for it in router for rule in it["rules"]), label)


def check_security(label, rendered):
    """The restricted profile of pod security, and a read-only root."""
    for pod, spec in pod_specs(rendered):
        where = f"{label}: {pod}"
        security = spec["securityContext"]
        check("runs as a numbered user that is not root", security["runAsNonRoot"] and security["runAsUser"] == 65532, where)
        check("has the default seccomp profile", security["seccompProfile"] == {"type": "RuntimeDefault"}, where)
        check("says whether it needs a token", "automountServiceAccountToken" in spec, where)
        check("uses nothing of the host", not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), where)
        volumes = {kind for it in spec.get("volumes", []) for kind in it if kind != "name"}
        check("mounts no folder of the host", "hostPath" not in volumes, where)
        for container in spec["containers"] + spec.get("initContainers", []):
            security = container["securityContext"]
            check("gains no privileges", security["allowPrivilegeEscalation"] is False, where)
            check("drops all capabilities", security["capabilities"] == {"drop": ["ALL"]}, where)
            check("writes nothing to its root", security["readOnlyRootFilesystem"] is True, where)
            check("asks for resources and has a limit of memory",
                  "requests" in container["resources"] and "memory" in container["resources"]["limits"], where)


def variables(rendered):
    (deployment,) = [it for it in of_kind(rendered, "Deployment") if it["metadata"]["name"].endswith("-operator")]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {it["name"]: it["value"] for it in container["env"]}


def check_cases():
    """Every file of values, against its golden file and what must hold for all."""
    for values in sorted(TESTS.glob("values/*.yaml")):
        text = must(helm("--values", str(values)))
        golden = TESTS / "expected" / values.name
        if os.environ.get("UPDATE_EXPECT"):
            golden.write_text(text)
        check(f"{golden.relative_to(ROOT)} is what the chart renders (UPDATE_EXPECT=1 writes it anew)",
              golden.exists() and golden.read_text() == text)
        rendered = objects(text)
        label = values.stem
        check_rights(label, rendered, patching=label != "namespaced")
        check_security(label, rendered)
        for it in rendered:
            check("carries the recommended labels", it["metadata"]["labels"]["app.kubernetes.io/part-of"] == "kvrouter", name(it))
        must(run(["helm", "lint", "--strict", "--quiet", str(CHART), "--values", str(values)]))


def check_default():
    rendered = objects(must(helm()))
    definitions = of_kind(rendered, "CustomResourceDefinition")
    check("both definitions are there", {it["metadata"]["name"] for it in definitions} == DEFINITIONS)
    check("they are kept", all(it["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for it in definitions))
    sources = {}
    for path in sorted((ROOT / "crds/yaml").glob("*.yaml")):
        (source,) = objects(path.read_text())
        sources[source["metadata"]["name"]] = source
    for it in definitions:
        source = sources[it["metadata"]["name"]]
        check("a definition is the generated one", it["spec"] == source["spec"], it["metadata"]["name"])
        extra = set(it["metadata"]["annotations"]) - set(source["metadata"].get("annotations", {}))
        check("and keeps its annotations", extra == {"helm.sh/resource-policy"}, str(extra))
    rendered = objects(must(helm("--set", "crds.keep=off")))
    check("they are not kept when they need not be",
          all("helm.sh/resource-policy" not in it["metadata"]["annotations"] for it in of_kind(rendered, "CustomResourceDefinition")))
    check("the chart makes no pool and no router", not of_kind(rendered, "InferencePool", "KvRouter"))
    check("a single operator has no disruption budget", not of_kind(rendered, "PodDisruptionBudget"))
    check("three have one", of_kind(objects(must(helm("--set", "replicas=3"))), "PodDisruptionBudget"))


def check_namespaced():
    rendered = objects(must(helm("--set", "watchNamespaces={demo,ai}")))
    for role, rule in rules(rendered):
        if role["kind"] == "ClusterRole" and role["metadata"]["name"] != "kvrouter-router":
            check("cluster-wide the operator only reads definitions",
                  (rule["resources"], rule["verbs"]) == (["customresourcedefinitions"], ["get", "list", "watch"]), str(rule))
    cluster_bindings = of_kind(rendered, "ClusterRoleBinding")
    check("nothing else is bound cluster-wide",
          [it["roleRef"]["name"] for it in cluster_bindings] == ["kvrouter-system-kvrouter-operator"])
    places = {it["metadata"]["namespace"] for it in of_kind(rendered, "Role", "RoleBinding")}
    check("roles stand in the namespaces and, for the Lease, beside the operator", places == {"demo", "ai", "kvrouter-system"}, str(places))
    check("the operator knows them", variables(rendered)["KVROUTER_OPERATOR_WATCH_NAMESPACES"] == "demo,ai")


def check_broker():
    url = "KVROUTER_OPERATOR_NATS_URL"
    for arguments, expected in [
        ((), "nats://kvrouter-nats.kvrouter-system.svc:4222"),
        (("--set", "nats.enabled=off"), None),
        (("--set-string", "nats.enabled=false"), None),
        (("--set", "nats.enabled=false", "--set", "nats.url=tls://broker:4222"), "tls://broker:4222"),
        (("--set", "nats.auth.existingSecret=a"), None),
    ]:
        rendered = objects(must(helm(*arguments)))
        check(f"the broker of pools that name none, with {arguments}", variables(rendered).get(url) == expected, str(variables(rendered).get(url)))
        check("no broker is run that was not asked for",
              any(it["metadata"]["name"] == "kvrouter-nats" for it in rendered) == ("nats.enabled" not in str(arguments)), str(arguments))


def check_refusals():
    """What is refused, and the words by which the user finds the mistake."""
    for arguments, words in [
        (["--set", "replica=2"], "additional properties 'replica' not allowed"),
        (["--set", "replicas=two"], "at '/replicas': got string, want integer"),
        (["--set", "replicas=11"], "at '/replicas'"),
        (["--set", "nats.enabled=maybe"], "at '/nats/enabled': value must be one of true, false"),
        (["--set", "imagePullPolicy=Sometimes"], "'Always', 'IfNotPresent', 'Never'"),
        (["--set", "operator.image=a b"], "at '/operator/image'"),
        (["--set", "nats.image="], "at '/nats/image'"),
        (["--set", "registry=ghcr.io/"], "at '/registry'"),
        (["--set", "watchNamespaces=demo"], "at '/watchNamespaces': got string, want array"),
        (["--set", "watchNamespaces={Demo}"], "at '/watchNamespaces/0'"),
        (["--set", "resources.request.cpu=1"], "at '/resources': additional properties 'request' not allowed"),
        (["--set", "nats.url=localhost:4222"], "at '/nats/url'"),
        (["--set", "nats.url=nats://user:word@broker:4222"], "at '/nats/url'"),
        (["--set", "nats.url=nats://broker:4222"], "set nats.enabled to false, or remove the url"),
        (["--set", "nats.networkPolicy.enabled=true"], "list the namespaces of routers and engines"),
        (["--set", "replicas=2", "--set", "leaderElection.enabled=off"], "two operators would work against each other"),
        (["--set", "test.model=m"], "test.model needs test.routerUrl"),
        (["--set", "pollSeconds=0"], "at '/pollSeconds'"),
        (["--set", "podMonitor.interval=often"], "at '/podMonitor/interval'"),
    ]:
        process = helm(*arguments)
        check(f"{arguments} is refused with `{words}`", process.returncode != 0 and words in process.stderr, process.stderr.strip())
    process = run(["helm", "template", "k", str(CHART), "--set", "podMonitor.enabled=on"])
    check("PodMonitors need their definition", "install them, or set podMonitor.enabled to false" in process.stderr, process.stderr)
    process = run(["helm", "template", "k", str(CHART), "--kube-version", "1.30.9"])
    check("old clusters are refused", "1.31.0" in process.stderr, process.stderr)


def leaves(schema, defaults, path=""):
    """Every value of the schema beside what stands in values.yaml."""
    for key, value in schema.get("properties", {}).items():
        here = f"{path}.{key}" if path else key
        yield here, value, isinstance(defaults, dict) and key in defaults
        if "properties" in value:
            yield from leaves(value, defaults.get(key, {}), here)


def check_documentation():
    schema = json.loads((CHART / "values.schema.json").read_text())
    readme = (CHART / "README.md").read_text()
    # JSON of values.yaml, by way of an object that kubectl reads.
    text = (CHART / "values.yaml").read_text()
    lines = "".join(f"  {line}\n" for line in text.splitlines())
    (wrapped,) = objects(f"apiVersion: check/v1\nkind: Values\nmetadata: {{name: values}}\nspec:\n{lines}")
    for path, value, given in leaves(schema, wrapped["spec"]):
        described = "description" in value or "description" in schema["definitions"][value["$ref"].rsplit("/", 1)[1]]
        check("a value is described", described, path)
        if path == "global":
            continue
        check("a value stands in values.yaml", given or path.endswith(".claims"), path)
        if "properties" not in value:
            check("a value stands in README.md", f"`{path}`" in readme, path)
    version = next(line for line in (ROOT / "Cargo.toml").read_text().splitlines() if line.startswith("version = ")).split('"')[1]
    chart = (CHART / "Chart.yaml").read_text()
    check("the chart's appVersion is the workspace's version", f'appVersion: "{version}"' in chart, version)


def main():
    check_cases()
    check_default()
    check_namespaced()
    check_broker()
    check_refusals()
    check_documentation()
    for failure in failures:
        print(f"chart: {failure}", file=sys.stderr)
    print(f"chart: {checks - len(failures)} claims hold, {len(failures)} do not")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
