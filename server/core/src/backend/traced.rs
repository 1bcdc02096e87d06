//! What the span of a request says about it.

use expertd_telemetry::RequestTrace;
use expertd_types::Phase;
use opentelemetry::{Array, KeyValue, Value};

use super::request::{Receipt, Request, StepTiming};

impl Request {
    /// Describes the request in its span.
    pub fn describe_in(&self, trace: &RequestTrace) {
        trace.describe([
            KeyValue::new("expertd.request", number(self.id.0)),
            KeyValue::new("expertd.layer", i64::from(self.layer.0)),
            KeyValue::new("expertd.tokens", number(self.tokens as u64)),
            KeyValue::new("expertd.dtype", self.dtype.to_string()),
            KeyValue::new("expertd.routing", if self.routing.is_some() { "given" } else { "gate" }),
        ]);
    }
}

impl Receipt {
    /// Adds to the span what the receipt says: a child for the time in the queue, and one for each step.
    pub fn describe_in(&self, trace: &RequestTrace) {
        let ranks = self.tokens_per_rank.iter().map(|tokens| i64::from(*tokens)).collect();
        trace.describe([
            KeyValue::new("expertd.generation", number(self.generation.0)),
            KeyValue::new("expertd.weight_version", number(self.weight_version.0)),
            KeyValue::new("expertd.weight_fingerprint", self.weight_fingerprint.to_string()),
            KeyValue::new("expertd.steps", number(self.steps.len() as u64)),
            KeyValue::new("expertd.tokens_per_rank", Value::Array(Array::I64(ranks))),
        ]);
        if let Some(first) = self.timings.first() {
            let admitted = first.formed.checked_sub(self.queue_time).unwrap_or(first.formed);
            trace.child("queue", admitted, first.formed, Vec::new());
        }
        for timing in &self.timings {
            trace.child("step", timing.formed, timing.done, step_attributes(timing));
        }
    }
}

fn step_attributes(timing: &StepTiming) -> Vec<KeyValue> {
    let phases = Phase::ALL.iter().zip(timing.phases);
    let phases = phases.map(|(phase, time)| {
        KeyValue::new(format!("expertd.phase.{}_seconds", phase.name()), time.as_secs_f64())
    });
    let about = [
        KeyValue::new("expertd.step", number(timing.step.0)),
        KeyValue::new("expertd.step_tokens", i64::from(timing.tokens)),
    ];
    about.into_iter().chain(phases).collect()
}

fn number(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
