//! The check of a checkpoint that a running service is to load.

use std::path::Path;
use std::process::{Command, Stdio};

use expertd_core::steps::{ReloadContext, ReloadPlan};
use expertd_ipc::control::{CheckpointSource, DeviceKind};
use expertd_model::ModelSpec;
use expertd_rank::share::{ExpertShare, available_memory};
use expertd_types::{Coverage, ExpertPlacement, Rank, WeightFingerprint};
use serde_json::Value;

use super::division::Division;
use crate::units::bytes;

/// Memory that must stay free beside both sets of weights, in bytes.
const RESERVE: u64 = 256 << 20;

/// What a reload must keep to, so that `serve` would start with the same weights.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReloadRules {
    /// Number of ranks that get rows.
    pub(super) sources: usize,
    /// How a mixed group divides experts; `None` in other groups.
    pub(super) division: Option<Division>,
    /// Whether weights may exceed the memory that is available.
    pub(super) skip_memory_check: bool,
}

impl ReloadRules {
    /// Checks that the checkpoint in `folder` (`None`: the present folder) has the shape of the present one and that the placement can
    /// serve, and whether host memory has room for both sets of weights. A child process reads the weights.
    ///
    /// # Errors
    /// The reason why the checkpoint or the placement cannot serve.
    pub(super) fn plan(&self, context: &ReloadContext, folder: Option<&Path>) -> Result<ReloadPlan, String> {
        let spec: ModelSpec = serde_json::from_value(context.spec.clone())
            .map_err(|error| format!("cannot read the description of the present checkpoint: {error}"))?;
        let placement = self.placement(&spec, context.checkpoint.placement.clone())?;
        let has_room = self.has_room(&spec, context, placement.as_ref(), available_memory())?;
        let present = CheckpointSource { placement, ..context.checkpoint.clone() };
        Ok(ReloadPlan { source: find(context, &present, folder)?, has_room })
    }

    /// The placement that the weights get; `None` asks for contiguous ranges.
    fn placement(
        &self,
        spec: &ModelSpec,
        asked: Option<ExpertPlacement>,
    ) -> Result<Option<ExpertPlacement>, String> {
        let Some(division) = &self.division else { return Ok(asked) };
        let placement = match asked {
            Some(placement) => placement,
            None => division.contiguous(spec).map_err(|problem| format!("--gpu-memory {problem}"))?,
        };
        division.check(spec, &placement).map_err(|problem| format!("the placement {problem}"))?;
        Ok(Some(placement))
    }

    /// Whether host memory, of which `available` bytes are available, has room for the weights beside the present ones.
    ///
    /// # Errors
    /// If it has no room for them once the present ones are dropped, although these fitted.
    fn has_room(
        &self,
        spec: &ModelSpec,
        context: &ReloadContext,
        placement: Option<&ExpertPlacement>,
        available: Option<u64>,
    ) -> Result<bool, String> {
        if !context.devices.contains(&DeviceKind::Cpu) {
            return Ok(true);
        }
        let packed = |placement| packed_bytes(spec, &context.devices, self.sources, placement);
        let (new, present) = (packed(placement), packed(context.serving_placement.as_ref()));
        if let Some(left) = available.map(|available| available + present)
            && new > present
            && new + RESERVE > left
            && !self.skip_memory_check
        {
            return Err(format!(
                "with this placement the weights on CPUs need {}, and without the present ones {} of memory are available; place fewer \
                 copies of experts{}, or start the service with --skip-memory-check",
                bytes(new + RESERVE),
                bytes(left),
                if self.division.is_some() { ", or more experts on the source rank" } else { "" }
            ));
        }
        let is_available = available.is_none_or(|available| new + RESERVE <= available);
        Ok(is_available && context.max_weight_bytes.is_none_or(|most| new + present <= most))
    }
}

/// Checks that the checkpoint in `folder` (`None`: the present folder) has the shape of the present one.
fn find(
    context: &ReloadContext,
    present: &CheckpointSource,
    folder: Option<&Path>,
) -> Result<CheckpointSource, String> {
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
    Ok(CheckpointSource { folder: folder.to_owned(), fingerprint: found.fingerprint, ..present.clone() })
}

/// Host memory that the packed weights of all ranks on CPUs take, in bytes. The first `sources` ranks get rows.
pub(super) fn packed_bytes(
    spec: &ModelSpec,
    devices: &[DeviceKind],
    sources: usize,
    placement: Option<&ExpertPlacement>,
) -> u64 {
    let share = |rank| {
        let share = ExpertShare::of_rank(Rank(rank), devices.len(), placement.cloned());
        share.with_sources(sources).bytes(spec)
    };
    let on_cpus = (0..).zip(devices).filter(|(_, device)| **device == DeviceKind::Cpu);
    let bytes: u64 = on_cpus.map(|(rank, _)| share(rank)).sum();
    // Packed matrices are padded.
    bytes + bytes / 16
}

/// Available memory and the memory that the weights of all ranks on CPUs and `exchange` bytes beside them need, in MiB, if less is
/// available than they need. The first `sources` ranks get rows.
pub(super) fn lack_of_memory(
    spec: &ModelSpec,
    devices: &[DeviceKind],
    sources: usize,
    placement: Option<&ExpertPlacement>,
    exchange: u64,
) -> Option<(u64, u64)> {
    let needed = packed_bytes(spec, devices, sources, placement) + exchange + RESERVE;
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
        // A model stores fractions as f32; as f64 in JSON their last bits may differ.
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
    use expertd_types::{LayerId, LayerPlacement, LayerRange};
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
        assert_eq!(lack_of_memory(&spec, &[DeviceKind::Cpu; 2], 2, None, 0), None);
        let exchange = 2 * available_memory().unwrap();
        assert!(lack_of_memory(&spec, &[DeviceKind::Cpu; 2], 2, None, exchange).is_some());
        let large = available_memory().unwrap() / spec.layers[0].as_ref().unwrap().experts.count as u64;
        spec.layers[0].as_mut().unwrap().experts.bytes = large;
        let (available, needed) = lack_of_memory(&spec, &[DeviceKind::Cpu; 2], 2, None, 0).unwrap();
        assert!(available < needed, "{available} {needed}");
    }

    /// A context of `ranks` CPU ranks whose weights serve by `serving`.
    fn context(spec: &ModelSpec, ranks: usize, serving: Option<ExpertPlacement>) -> ReloadContext {
        let fingerprint = WeightFingerprint { coverage: Coverage::Sampled, digest: [0; 16] };
        ReloadContext {
            checkpoint: CheckpointSource {
                folder: "/nowhere".into(),
                layers: spec.held,
                fingerprint,
                placement: None,
            },
            serving_placement: serving,
            spec: serde_json::to_value(spec).unwrap(),
            devices: vec![DeviceKind::Cpu; ranks],
            max_weight_bytes: None,
        }
    }

    #[test]
    fn a_placement_that_host_memory_cannot_hold_alone_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        expertd_model::synth::write(&SynthConfig::new("mixtral"), folder.path()).unwrap();
        let spec = Checkpoint::open(folder.path()).unwrap().spec().clone();
        let rules = ReloadRules { sources: 2, division: None, skip_memory_check: false };
        let all: Vec<u32> = (0..8).collect();
        let copies = spec.moe_layers().map(|(layer, _)| (layer, LayerPlacement::new(vec![all.clone(); 2])));
        let copies = ExpertPlacement::new(2, copies);
        let context = context(&spec, 2, None);
        let even = packed_bytes(&spec, &context.devices, 2, None);
        assert_eq!(packed_bytes(&spec, &context.devices, 2, Some(&copies)), 2 * even);
        let has_room = |placement, available| rules.has_room(&spec, &context, placement, Some(available));
        // Twice as much needs what the present ones take, and as much again.
        let (enough, beside) = (even + RESERVE, 2 * even + RESERVE);
        assert_eq!(has_room(Some(&copies), beside), Ok(true));
        assert_eq!(has_room(Some(&copies), enough), Ok(false), "the present ones are dropped first");
        let refused = has_room(Some(&copies), enough - 1).unwrap_err();
        assert!(refused.contains("fewer copies") && refused.contains("are available"), "{refused}");
        assert_eq!(has_room(None, 0), Ok(false), "what fitted before fits again");
        let unchecked = ReloadRules { skip_memory_check: true, ..rules };
        assert_eq!(unchecked.has_room(&spec, &context, Some(&copies), Some(0)), Ok(false));
        let limited = ReloadContext { max_weight_bytes: Some(3 * even - 1), ..context.clone() };
        assert_eq!(rules.has_room(&spec, &limited, Some(&copies), Some(beside)), Ok(false));
        let limited = ReloadContext { max_weight_bytes: Some(3 * even), ..limited };
        assert_eq!(rules.has_room(&spec, &limited, Some(&copies), Some(beside)), Ok(true));
    }

    #[test]
    fn a_placement_is_checked_before_the_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        expertd_model::synth::write(&SynthConfig::new("mixtral"), folder.path()).unwrap();
        let spec = Checkpoint::open(folder.path()).unwrap().spec().clone();
        let division = Division {
            device: DeviceKind::Cpu,
            products: expertd_types::Fp8Products::NONE,
            budget: Some(1),
            workers: 1,
        };
        let rules = ReloadRules { sources: 1, division: Some(division), skip_memory_check: true };
        let refused = rules.plan(&context(&spec, 2, None), None).unwrap_err();
        assert!(refused.starts_with("--gpu-memory is 1 B"), "{refused}");
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
