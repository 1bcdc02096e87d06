//! Declarations of rotations that the rows of a matrix go through before or after the product. The service has none, and without them
//! every row would be wrong.

use serde_json::{Map, Value};

use crate::ModelError;
use crate::config::Config;

/// Fields in which AutoRound declares them.
const FIELDS: [&str; 2] = ["rotation_config", "spinquant_config"];

/// Refuses rotations of rows. Rotations of weights are part of the stored weights.
pub(super) fn refuse(config: &Config, map: &Map<String, Value>) -> Result<(), ModelError> {
    if let Some(field) = declared(map) {
        return Err(unsupported(config, field));
    }
    let modules = map.get("extra_config").and_then(Value::as_object);
    for (name, module) in modules.into_iter().flatten() {
        if let Some(field) = module.as_object().and_then(declared) {
            return Err(unsupported(config, &format!("extra_config.{name}.{field}")));
        }
    }
    let groups = map
        .get("transform_config")
        .and_then(|transforms| transforms.get("config_groups"))
        .and_then(Value::as_object);
    for (name, group) in groups.into_iter().flatten() {
        let places = group.get("apply").and_then(Value::as_array);
        let place = |apply: &Value| apply.get("location").and_then(Value::as_str).map(str::to_owned);
        let of_rows = |place: &String| matches!(place.as_str(), "input" | "output");
        if let Some(place) = places.into_iter().flatten().filter_map(place).find(of_rows) {
            let what = format!("transform_config.config_groups.{name}.apply with location {place}");
            return Err(unsupported(config, &what));
        }
    }
    Ok(())
}

/// The field in which AutoRound declares a rotation, if it does.
fn declared(map: &Map<String, Value>) -> Option<&'static str> {
    let set = |field: &&str| match map.get(*field) {
        None | Some(Value::Null | Value::Bool(false)) => false,
        Some(Value::Object(object)) => !object.is_empty(),
        Some(_) => true,
    };
    FIELDS.into_iter().find(set)
}

fn unsupported(config: &Config, field: &str) -> ModelError {
    let (path, object) = config.quantization_place();
    let why = "rows would have to be rotated beside the products; quantise again without rotations, or with those of weights alone";
    ModelError::Unsupported { path, what: format!("{object}{field}"), why: why.into() }
}
