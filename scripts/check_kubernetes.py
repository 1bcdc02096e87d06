#!/usr/bin/env python3
"""Renders every overlay in deploy/kubernetes and validates the result.

Kubernetes' own kinds are checked against its published schemas (PyPI: kubernetes-validate), PodMonitor and ScaledObject
against those of the Prometheus operator and KEDA (npm: @kubernetes-models). Needs kubectl or kustomize, and npm.

    python3 -m venv target/tools/kubernetes && target/tools/kubernetes/bin/pip install kubernetes-validate==1.37.0
    target/tools/kubernetes/bin/python scripts/check_kubernetes.py [--write-rules]

--write-rules makes components/monitoring/prometheusrule.yaml from deploy/prometheus/rules.yaml; without it, both must agree.
"""

import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
import types

import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
TOOLS = ROOT / "target" / "tools" / "npm"
KUBERNETES = "1.32.0"
NPM = {"@kubernetes-models/keda": "0.4.2", "@kubernetes-models/prometheus-operator": "6.0.0"}
RULES = ROOT / "deploy/prometheus/rules.yaml"
PROMETHEUS_RULE = FOLDER / "components/monitoring/prometheusrule.yaml"
PLUGIN_SETTINGS = ROOT / "python/expertd/_engines/settings.py"
CUSTOM = {
    "PodMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PodMonitor",
    "PrometheusRule": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PrometheusRule",
    "ScaledObject": "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject",
}
NODE = """
const [module, kind, text] = process.argv.slice(1);
const models = await import(module);
new (models[kind] ?? models.default[kind])(JSON.parse(text)).validate();
"""


def render(overlay: pathlib.Path) -> list[dict]:
    if shutil.which("kustomize"):
        command = ["kustomize", "build"]
    elif shutil.which("kubectl"):
        command = ["kubectl", "kustomize"]
    else:
        sys.exit("neither kustomize nor kubectl was found; install one of them")
    text = subprocess.run([*command, str(overlay)], check=True, capture_output=True, text=True).stdout
    return [document for document in yaml.safe_load_all(text) if document]


def check_custom(document: dict) -> str | None:
    """Validates a custom resource; the text of its error, if any."""
    if not (TOOLS / "node_modules").is_dir():
        packages = [f"{name}@{version}" for name, version in NPM.items()]
        TOOLS.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--silent", "--no-save", "--prefix", str(TOOLS), *packages]
        subprocess.run(command, check=True)
    command = ["node", "--input-type=module", "-e", NODE, CUSTOM[document["kind"]], document["kind"]]
    run = subprocess.run([*command, json.dumps(document)], cwd=TOOLS, capture_output=True, text=True)
    if run.returncode == 0:
        return None
    lines = [line for line in run.stderr.splitlines() if re.match(r"\w*Error", line)]
    return lines[0] if lines else run.stderr


def settings() -> set[str]:
    """Environment variables that `expertd serve` knows."""
    text = (ROOT / "server/cli/src/serve/settings.rs").read_text()
    return set(re.findall(r'env "(EXPERTD_[A-Z0-9_]+)"', text))


def engine_settings(environment: dict[str, str]) -> str | None:
    """What the plugin for engines says of these variables; None if it is active with them."""
    # The package itself needs a build; its settings need only this class of it.
    client = types.ModuleType("expertd._client")
    client.Credentials = dict
    sys.modules |= {"expertd._client": client}
    spec = importlib.util.spec_from_file_location("expertd._engines.settings", PLUGIN_SETTINGS)
    plugin = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = plugin
    spec.loader.exec_module(plugin)
    try:
        found = plugin.Settings.from_environment(environment)
    except ValueError as error:
        return str(error)
    return None if found else "without EXPERTD_ADDRESS the plugin is not active"


def check_engine(container: dict, service: dict) -> list[str]:
    """An engine beside the service: the plugin takes its variables, and they name the service's session socket."""
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    text = PLUGIN_SETTINGS.read_text()
    errors = [f"engine: {name} is no variable of the plugin" for name in environment if name not in text]
    if problem := engine_settings(environment):
        errors.append(f"engine: {problem}")
    socket = next(v["value"] for v in service["env"] if v["name"] == "EXPERTD_SESSION_LISTEN")
    if environment.get("EXPERTD_ADDRESS") != socket:
        errors.append(f"engine: EXPERTD_ADDRESS is {environment.get('EXPERTD_ADDRESS')}, the session socket is {socket}")
    if container["securityContext"]["readOnlyRootFilesystem"] and "/tmp" not in paths(container):
        errors.append("engine: the root is read-only and nothing is mounted at /tmp")
    return errors


def paths(container: dict) -> list[str]:
    return [mount["mountPath"] for mount in container["volumeMounts"]]


def check_policies(documents: list[dict]) -> list[str]:
    """Each port of the pods is open to someone, and an engine beside the service can resolve names."""
    policies = [document["spec"] for document in documents if document["kind"] == "NetworkPolicy"]
    opened = {port["port"] for policy in policies for rule in policy.get("ingress", []) for port in rule.get("ports", [])}
    resolves = any(port["port"] == 53 for policy in policies for rule in policy.get("egress", []) for port in rule.get("ports", []))
    errors = []
    for document in documents:
        if document["kind"] != "StatefulSet":
            continue
        containers = document["spec"]["template"]["spec"]["containers"]
        for port in (port["name"] for container in containers for port in container["ports"]):
            if port not in opened:
                errors.append(f"no network policy opens port {port}")
        if len(containers) > 1 and not resolves:
            errors.append("no network policy lets the engine resolve names")
    return errors


def prometheus_rule() -> str:
    """The rules as a resource of the Prometheus operator."""
    head = f"# Made from {RULES.relative_to(ROOT)} by scripts/check_kubernetes.py --write-rules.\n"
    head += "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: expertd\nspec:\n"
    return head + "".join(f"  {line}\n" for line in RULES.read_text().splitlines())


def check_service(document: dict) -> list[str]:
    """What no schema says: known settings, and ports and volumes that exist."""
    pod = document["spec"]["template"]["spec"]
    container = pod["containers"][0]
    errors = []
    for variable in container["env"]:
        if variable["name"] not in settings():
            errors.append(f"{variable['name']} is no setting of `expertd serve`")
    for engine in pod["containers"][1:]:
        errors += check_engine(engine, container)
    ports = {port["name"] for port in container["ports"]}
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"]:
        if container[probe]["httpGet"]["port"] not in ports:
            errors.append(f"{probe}: port {container[probe]['httpGet']['port']} is not one of {sorted(ports)}")
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounted = {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]}
    if mounted != volumes:
        errors.append(f"volumes {sorted(volumes)}, but mounts {sorted(mounted)}")
    labels = document["spec"]["template"]["metadata"]["labels"]
    if document["spec"]["selector"]["matchLabels"].items() - labels.items():
        errors.append("the selector does not select the pods")
    version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)
    if version and not container["image"].endswith(":" + version.group(1)):
        errors.append(f"image {container['image']} is not of version {version.group(1)}")
    return errors


def check(document: dict) -> list[str]:
    if document["kind"] in CUSTOM:
        error = check_custom(document)
        # The schemas allow unknown fields, so a misspelt list would only be missing.
        lists = {"PodMonitor": "podMetricsEndpoints", "PrometheusRule": "groups", "ScaledObject": "triggers"}
        if not document["spec"].get(lists[document["kind"]]):
            error = f"spec.{lists[document['kind']]} is empty"
        return [error] if error else []
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(str(part) for part in error.path)}: {error.message}"]
    if document["kind"] == "StatefulSet":
        return check_service(document)
    selector = document["spec"].get("selector", document["spec"].get("podSelector"))
    return [] if selector else ["an empty selector selects every pod of the namespace"]


def main() -> None:
    if "--write-rules" in sys.argv:
        PROMETHEUS_RULE.write_text(prometheus_rule())
    failed = 0
    if PROMETHEUS_RULE.read_text() != prometheus_rule():
        failed += 1
        print(f"{PROMETHEUS_RULE.relative_to(ROOT)} is stale: run scripts/check_kubernetes.py --write-rules")
    overlays = sorted(path.parent for path in FOLDER.glob("overlays/*/kustomization.yaml"))
    if not overlays:
        sys.exit(f"no overlays in {FOLDER}")
    for overlay in overlays:
        documents = render(overlay)
        for document in documents:
            for error in check(document):
                failed += 1
                print(f"{overlay.name}: {document['kind']} {document['metadata']['name']}: {error}")
        for error in check_policies(documents):
            failed += 1
            print(f"{overlay.name}: {error}")
        print(f"{overlay.name}: {len(documents)} objects")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
