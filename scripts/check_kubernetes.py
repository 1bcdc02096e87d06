#!/usr/bin/env python3
"""Renders every overlay in deploy/kubernetes and validates the result.

Kubernetes' own kinds are checked against its published schemas (PyPI: kubernetes-validate), PodMonitor and ScaledObject
against those of the Prometheus operator and KEDA (npm: @kubernetes-models). Needs kubectl or kustomize, and npm.

    python3 -m venv target/tools/kubernetes && target/tools/kubernetes/bin/pip install kubernetes-validate==1.37.0
    target/tools/kubernetes/bin/python scripts/check_kubernetes.py
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
TOOLS = ROOT / "target" / "tools" / "npm"
KUBERNETES = "1.32.0"
NPM = {"@kubernetes-models/keda": "0.4.2", "@kubernetes-models/prometheus-operator": "6.0.0"}
CUSTOM = {
    "PodMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PodMonitor",
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


def check_service(document: dict) -> list[str]:
    """What no schema says: known settings, and ports and volumes that exist."""
    pod = document["spec"]["template"]["spec"]
    container = pod["containers"][0]
    errors = []
    for variable in container["env"]:
        if variable["name"] not in settings():
            errors.append(f"{variable['name']} is no setting of `expertd serve`")
    ports = {port["name"] for port in container["ports"]}
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"]:
        if container[probe]["httpGet"]["port"] not in ports:
            errors.append(f"{probe}: port {container[probe]['httpGet']['port']} is not one of {sorted(ports)}")
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounted = {mount["name"] for mount in container["volumeMounts"]}
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
        lists = {"PodMonitor": "podMetricsEndpoints", "ScaledObject": "triggers"}
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
    failed = 0
    overlays = sorted(path.parent for path in FOLDER.glob("overlays/*/kustomization.yaml"))
    if not overlays:
        sys.exit(f"no overlays in {FOLDER}")
    for overlay in overlays:
        documents = render(overlay)
        for document in documents:
            for error in check(document):
                failed += 1
                print(f"{overlay.name}: {document['kind']} {document['metadata']['name']}: {error}")
        print(f"{overlay.name}: {len(documents)} objects")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
