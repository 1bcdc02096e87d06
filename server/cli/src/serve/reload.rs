//! The check of a checkpoint that a running service is to load.

use std::path::Path;
use std::process::{Command, Stdio};

use expertd_core::steps::{ReloadContext, ReloadPlan};
use expertd_ipc::control::{CheckpointSource, DeviceKind};
use expertd_model::ModelSpec;
use expertd_rank::share::{ExpertShare, available_memory};
use expertd_types::{Coverage, ExpertPlacement, Rank, WeightFingerprint};
use serde_json::Value;

/// Memory that must stay free beside both sets of weights, in bytes.
const RESERVE: u64 = 256 << 20;

/// Checks that the checkpoint in `folder` (`None`: the present folder) has the shape of the present one, and whether host memory
/// has room for both. A child process reads the weights.
pub(super) fn plan(context: &ReloadContext, folder: Option<&Path>) -> Result<ReloadPlan, String> {
    let present = &context.checkpoint;
    let folder = folder.unwrap_or(&present.folder);
    let found = inspect(folder, present).map_err(|problem| {
        if !problem.contains(&format!("layers {}:", present.layers)) {
            return problem;
        }
        format!("{problem}; this service holds layers {}, and a reload needs the same shape: start a service of its own for another \
                 model", present.layers)
    })?;
    if let Some(difference) = difference(&context.spec, &found.model, String::new()) {
        return Err(format!(
            "{}: the checkpoint has another shape than the present one: {difference}; start a service of its own for it",
            folder.display()
        ));
    }
    let mut has_room = true;
    if context.devices.contains(&DeviceKind::Cpu) {
        let spec: ModelSpec = serde_json::from_value(found.model)
            .map_err(|error| format!("cannot read the description of the checkpoint: {error}"))?;
        let packed = packed_bytes(&spec, &context.devices, present.placement.as_ref());
        let is_available = available_memory().is_none_or(|available| packed + RESERVE <= available);
        has_room = is_available && context.max_weight_bytes.is_none_or(|most| 2 * packed <= most);
    }
    let source =
        CheckpointSource { folder: folder.to_owned(), fingerprint: found.fingerprint, ..present.clone() };
    Ok(ReloadPlan { source, has_room })
}

/// Host memory that the packed weights of all ranks on CPUs take, in bytes.
fn packed_bytes(spec: &ModelSpec, devices: &[DeviceKind], placement: Option<&ExpertPlacement>) -> u64 {
    let share = |rank| ExpertShare::of_rank(Rank(rank), devices.len(), placement.cloned()).bytes(spec);
    let on_cpus = (0..).zip(devices).filter(|(_, device)| **device == DeviceKind::Cpu);
    let bytes: u64 = on_cpus.map(|(rank, _)| share(rank)).sum();
    // Packed matrices are padded.
    bytes + bytes / 16
}

/// Available memory and the memory that the weights of all ranks on CPUs need, in MiB, if less is available than they need.
pub(super) fn lack_of_memory(
    spec: &ModelSpec,
    devices: &[DeviceKind],
    placement: Option<&ExpertPlacement>,
) -> Option<(u64, u64)> {
    let needed = packed_bytes(spec, devices, placement) + RESERVE;
    let available = available_memory().filter(|available| *available < needed)?;
    Some((available >> 20, needed >> 20))
}

/// The output of `expertd inspect` for a checkpoint.
struct Inspected {
    model: Value,
    fingerprint: WeightFingerprint,
}

fn inspect(folder: &Path, present: &CheckpointSource) -> Result<Inspected, String> {
    let mut command = Command::new("/proc/self/exe");
    command.args(["--log", "off", "inspect", "--json", "--layers", &present.layers.to_string()]);
    // The check of a large checkpoint takes minutes, and must not outlive the service.
    command.args(["--parent", &std::process::id().to_string()]);
    if present.fingerprint.coverage == Coverage::Whole {
        command.arg("--verify-weights");
    }
    let output = command.arg("--").arg(folder).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("cannot start `expertd inspect`: {error}"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let text = text.trim().trim_start_matches("expertd inspect: ");
        return Err(if text.is_empty() {
            format!("{}: the check of the checkpoint ended with {}", folder.display(), output.status)
        } else {
            text.to_owned()
        });
    }
    let unreadable = |what: &str| format!("`expertd inspect` printed no {what} for {}", folder.display());
    let mut value: Value = serde_json::from_slice(&output.stdout).map_err(|_| unreadable("JSON"))?;
    let fingerprint = value["weight_fingerprint"].as_str().and_then(|text| text.parse().ok());
    let fingerprint = fingerprint.ok_or_else(|| unreadable("fingerprint"))?;
    Ok(Inspected { model: value["model"].take(), fingerprint })
}

/// The first difference between two descriptions of models, in words.
fn difference(present: &Value, new: &Value, path: String) -> Option<String> {
    match (present, new) {
        (Value::Object(present), Value::Object(new)) => present.iter().find_map(|(name, value)| {
            let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            difference(value, new.get(name).unwrap_or(&Value::Null), path)
        }),
        (Value::Array(present), Value::Array(new)) if present.len() == new.len() => (0..)
            .zip(present.iter().zip(new))
            .find_map(|(i, (present, new)): (usize, _)| difference(present, new, format!("{path}[{i}]"))),
        (Value::Array(present), Value::Array(new)) => {
            Some(format!("{path} has {} entries, expected {}", new.len(), present.len()))
        }
        // Fractions of a model are f32; text may change the last bits of their f64.
        (Value::Number(present), Value::Number(new)) if present.is_f64() && new.is_f64() => {
            let same = present.as_f64().map(|value| value as f32) == new.as_f64().map(|value| value as f32);
            (!same).then(|| format!("{path} is {new}, expected {present}"))
        }
        _ if present == new => None,
        _ => Some(format!("{path} is {new}, expected {present}")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use expertd_model::Checkpoint;
    use expertd_model::synth::SynthConfig;
    use expertd_types::{LayerId, LayerRange};
    use serde_json::json;

    use super::*;

    #[test]
    fn the_first_difference_of_shapes_is_named() {
        let present = json!({"hidden": 64, "layers": [null, {"experts": {"count": 8}}]});
        assert_eq!(difference(&present, &present.clone(), String::new()), None);
        let mut new = present.clone();
        new["layers"][1]["experts"]["count"] = json!(16);
        let found = difference(&present, &new, String::new()).unwrap();
        assert_eq!(found, "layers[1].experts.count is 16, expected 8");
        let epsilon = |value: &str| json!({"epsilon": serde_json::from_str::<Value>(value).unwrap()});
        let written = epsilon("9.999999682655225e-21");
        assert_eq!(difference(&epsilon("9.999999682655224e-21"), &written, String::new()), None);
        assert!(difference(&epsilon("1.1e-20"), &written, String::new()).is_some());
        new["layers"] = json!([]);
        assert_eq!(difference(&present, &new, String::new()).unwrap(), "layers has 0 entries, expected 2");
    }

    #[test]
    fn weights_beyond_the_available_memory_are_noticed() {
        let folder = tempfile::tempdir().unwrap();
        expertd_model::synth::write(&SynthConfig::new("olmoe"), folder.path()).unwrap();
        let mut spec = Checkpoint::open(folder.path()).unwrap().spec().clone();
        assert_eq!(lack_of_memory(&spec, &[DeviceKind::Cpu; 2], None), None);
        let large = available_memory().unwrap() / spec.layers[0].as_ref().unwrap().experts.count as u64;
        spec.layers[0].as_mut().unwrap().experts.bytes = large;
        let (available, needed) = lack_of_memory(&spec, &[DeviceKind::Cpu; 2], None).unwrap();
        assert!(available < needed, "{available} {needed}");
    }

    #[test]
    fn a_folder_without_a_checkpoint_is_a_reason() {
        // The test binary is not `expertd`, so the child fails in any case; a reason is given.
        let present = CheckpointSource {
            folder: "/nowhere".into(),
            layers: LayerRange { first: LayerId(0), last: LayerId(0) },
            fingerprint: WeightFingerprint { coverage: Coverage::Sampled, digest: [0; 16] },
            placement: None,
        };
        let Err(reason) = inspect(Path::new("/nowhere"), &present) else { panic!("no checkpoint") };
        assert!(!reason.is_empty());
    }
}
