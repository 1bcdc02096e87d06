//! Typed access to the fields of `config.json`, with errors that name file and field.

use std::path::{Component, Path, PathBuf};

use serde_json::{Map, Value};

use super::ModelError;

/// Largest accepted `config.json`; quantised releases list thousands of modules in theirs.
const MAX_CONFIG_BYTES: u64 = 64 << 20;

/// The fields of a model's text part: the whole file, or its `text_config`, which may lie within `thinker_config`.
#[derive(Debug)]
pub(super) struct Config {
    path: PathBuf,
    /// `"text_config."` or `"thinker_config.text_config."` if the fields are nested, otherwise empty.
    prefix: &'static str,
    text: Map<String, Value>,
    /// The outer object of a multimodal checkpoint, without its parts.
    outer: Map<String, Value>,
    /// The file that declares the quantisation, if it is not this one.
    quantization_file: Option<PathBuf>,
}

/// The file in which earlier releases of ModelOpt declare the quantisation.
const MODELOPT_FILE: &str = "hf_quant_config.json";

impl Config {
    /// Reads `config.json` in the directory of a checkpoint.
    pub(super) fn read(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let bytes = read_json_file(&path, MAX_CONFIG_BYTES).map_err(|error| match error {
            ModelError::Io { path, action, source } => {
                let source = match hint(dir, source.kind()) {
                    Some(hint) => std::io::Error::new(source.kind(), format!("{source}; {hint}")),
                    None => source,
                };
                ModelError::Io { path, action, source }
            }
            other => other,
        })?;
        let mut config = Self::parse(path, &bytes)?;
        let file = dir.join(MODELOPT_FILE);
        if config.get("quantization_config").is_none() && file.exists() {
            config.add_modelopt(file)?;
        }
        Ok(config)
    }

    /// Adds the contents of ModelOpt's file as `quantization_config`.
    fn add_modelopt(&mut self, file: PathBuf) -> Result<(), ModelError> {
        let bytes = read_json_file(&file, MAX_CONFIG_BYTES)?;
        let mut object: Map<String, Value> = serde_json::from_slice(&bytes)
            .map_err(|error| ModelError::Json { path: file.clone(), reason: error.to_string() })?;
        object.insert("quant_method".into(), "modelopt".into());
        self.text.insert("quantization_config".into(), Value::Object(object));
        self.quantization_file = Some(file);
        Ok(())
    }

    /// The file that declares the quantisation, and the prefix of the fields' names in it.
    pub(super) fn quantization_place(&self) -> (PathBuf, &'static str) {
        match &self.quantization_file {
            Some(file) => (file.clone(), ""),
            None => (self.path.clone(), "quantization_config."),
        }
    }

    /// Parses the bytes of a `config.json`.
    pub(super) fn parse(path: PathBuf, bytes: &[u8]) -> Result<Self, ModelError> {
        let value: Value = serde_json::from_slice(bytes)
            .map_err(|error| ModelError::Json { path: path.clone(), reason: error.to_string() })?;
        let Value::Object(mut outer) = value else {
            return Err(ModelError::Json {
                path,
                reason: format!("expected an object, found {}", kind(&value)),
            });
        };
        let mut prefix = "text_config.";
        if let Some(Value::Object(thinker)) = outer.remove("thinker_config") {
            prefix = "thinker_config.text_config.";
            outer.retain(|name, value| !value.is_object() || name == "quantization_config");
            outer.extend(thinker);
        }
        match outer.remove("text_config") {
            Some(Value::Object(mut text)) => {
                // Multimodal releases keep this field in the outer object, beside the parts that it applies to.
                if let Some(quantization) = outer.remove("quantization_config") {
                    text.entry("quantization_config").or_insert(quantization);
                }
                outer.retain(|_, value| !value.is_object());
                Ok(Self { path, prefix, text, outer, quantization_file: None })
            }
            Some(other) if !other.is_null() => Err(ModelError::Field {
                path,
                field: prefix.trim_end_matches('.').into(),
                expected: "an object".into(),
                found: kind(&other).into(),
            }),
            _ => {
                let quantization_file = None;
                Ok(Self { path, prefix: "", text: outer, outer: Map::new(), quantization_file })
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a field is present, even if it is null.
    pub(super) fn has(&self, name: &str) -> bool {
        self.text.contains_key(name)
    }

    /// Names of all fields, including those of a multimodal checkpoint's outer object.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.text.keys().chain(self.outer.keys()).map(String::as_str)
    }

    /// The object `quantization_config`, if it is present.
    pub(super) fn quantization(&self) -> Result<Option<&Map<String, Value>>, ModelError> {
        match self.get("quantization_config") {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(self.wrong("quantization_config", "an object", other)),
        }
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.text.get(name).filter(|value| !value.is_null())
    }

    /// An error about a field that is present.
    pub(super) fn wrong(&self, name: &str, expected: &str, found: &Value) -> ModelError {
        self.wrong_text(name, expected, &show(found))
    }

    /// An error about a field.
    pub(super) fn wrong_text(&self, name: &str, expected: &str, found: &str) -> ModelError {
        ModelError::Field {
            path: self.path.clone(),
            field: format!("{}{name}", self.prefix),
            expected: expected.into(),
            found: found.into(),
        }
    }

    /// An integer of at most `max`, if the field is present. A list that has the same integer for every layer is taken as
    /// that integer.
    pub(super) fn opt_usize(&self, name: &str, max: usize) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = match value.as_array().map(Vec::as_slice) {
            Some([first, rest @ ..]) if rest.iter().all(|other| other == first) => first,
            _ => value,
        };
        match number.as_u64().and_then(|n| usize::try_from(n).ok()) {
            Some(n) if n <= max => Ok(Some(n)),
            _ => {
                let or_list = if value.is_array() { ", the same for every layer" } else { "" };
                Err(self.wrong(name, &format!("an integer from 0 to {max}{or_list}"), value))
            }
        }
    }

    /// A positive integer that has several possible names. If more than one is present, they must agree.
    pub(super) fn size(&self, names: &[&str], max: usize) -> Result<usize, ModelError> {
        self.opt_size(names, max)?.ok_or_else(|| {
            let expected = format!("an integer from 1 to {max}");
            self.wrong_text(&names.join("` or `"), &expected, "nothing: the field is missing")
        })
    }

    /// Like [`Self::size`], but `None` if no name is present.
    pub(super) fn opt_size(&self, names: &[&str], max: usize) -> Result<Option<usize>, ModelError> {
        let mut found: Option<(&str, usize)> = None;
        for name in names {
            let Some(n) = self.opt_usize(name, max)? else { continue };
            if n == 0 {
                return Err(self.wrong_text(name, &format!("an integer from 1 to {max}"), "0"));
            }
            match found {
                Some((other, m)) if m != n => {
                    return Err(self.wrong_text(
                        name,
                        &format!("{m}, the value of `{other}`"),
                        &n.to_string(),
                    ));
                }
                _ => found = Some((name, n)),
            }
        }
        Ok(found.map(|(_, n)| n))
    }

    pub(super) fn opt_f32(&self, name: &str) -> Result<Option<f32>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64() {
            #[allow(clippy::cast_possible_truncation, reason = "the computation is in f32")]
            Some(x) if (x as f32).is_finite() => Ok(Some(x as f32)),
            _ => Err(self.wrong(name, "a number", value)),
        }
    }

    pub(super) fn opt_bool(&self, name: &str) -> Result<Option<bool>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(name, "true or false", value))
    }

    /// Like [`Self::opt_bool`], for a field that has several possible names. If more than one is present, they must agree.
    pub(super) fn opt_flag(&self, names: &[&str]) -> Result<Option<bool>, ModelError> {
        let mut found: Option<(&str, bool)> = None;
        for name in names {
            let Some(flag) = self.opt_bool(name)? else { continue };
            match found {
                Some((other, known)) if known != flag => {
                    let expected = format!("{known}, the value of `{other}`");
                    return Err(self.wrong_text(name, &expected, &flag.to_string()));
                }
                _ => found = Some((name, flag)),
            }
        }
        Ok(found.map(|(_, flag)| flag))
    }

    /// A list of flags, `true` and `false` or 1 and 0, if the field is present.
    pub(super) fn opt_flags(&self, name: &str) -> Result<Option<Vec<bool>>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let flag = |value: &Value| match (value.as_bool(), value.as_u64()) {
            (Some(flag), _) => Some(flag),
            (_, Some(number @ (0 | 1))) => Some(number == 1),
            _ => None,
        };
        let list = value.as_array().and_then(|list| list.iter().map(flag).collect::<Option<Vec<_>>>());
        list.map(Some).ok_or_else(|| self.wrong(name, "a list of 0 and 1, or of true and false", value))
    }

    pub(super) fn opt_str(&self, name: &str) -> Result<Option<&str>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(name, "a string", value))
    }

    /// `model_type` of the text part, or else of the whole file.
    pub(super) fn model_type(&self) -> Result<&str, ModelError> {
        if let Some(own) = self.opt_str("model_type")? {
            return Ok(own);
        }
        let outer = self.outer.get("model_type").and_then(Value::as_str);
        outer.ok_or_else(|| self.wrong_text("model_type", "a string", "nothing: the field is missing"))
    }

    /// A list of layer indices, if the field is present.
    pub(super) fn opt_indices(&self, name: &str) -> Result<Option<Vec<usize>>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let list = value.as_array().and_then(|list| {
            list.iter().map(|v| v.as_u64().and_then(|n| usize::try_from(n).ok())).collect::<Option<Vec<_>>>()
        });
        list.map(Some).ok_or_else(|| self.wrong(name, "a list of layer indices", value))
    }

    /// A list of strings, if the field is present.
    pub(super) fn opt_words(&self, name: &str) -> Result<Option<Vec<&str>>, ModelError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let list =
            value.as_array().and_then(|list| list.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
        list.map(Some).ok_or_else(|| self.wrong(name, "a list of strings", value))
    }

    /// The raw value, for fields whose type varies between releases.
    pub(super) fn raw(&self, name: &str) -> Option<&Value> {
        self.get(name)
    }
}

/// What to do about a folder `dir` whose config.json cannot be read for a reason of this kind.
fn hint(dir: &Path, kind: std::io::ErrorKind) -> Option<&'static str> {
    match kind {
        std::io::ErrorKind::NotFound if !dir.exists() && is_hub_name(dir) => Some(
            "expected the folder of a checkpoint; a model's name on a hub is not one: download the model first",
        ),
        std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => {
            Some("expected the folder of a checkpoint, with config.json and *.safetensors")
        }
        _ => None,
    }
}

/// Whether a path has the form of a name on Hugging Face's hub, `OWNER/MODEL`.
fn is_hub_name(path: &Path) -> bool {
    let parts: Vec<_> = path.components().collect();
    matches!(parts[..], [Component::Normal(_), Component::Normal(_)])
}

/// Length of a regular file. Others are refused: opening a named pipe blocks, and a device may have no end.
pub(super) fn regular(path: &Path) -> std::io::Result<u64> {
    let found = std::fs::metadata(path)?;
    if found.is_dir() || found.is_file() {
        return Ok(found.len());
    }
    Err(std::io::Error::new(
        std::io::ErrorKind::InvalidInput,
        "expected a regular file, found a pipe, socket or device",
    ))
}

/// Reads a whole JSON file unless it is larger than `max_bytes`.
pub(super) fn read_json_file(path: &Path, max_bytes: u64) -> Result<Vec<u8>, ModelError> {
    let io = |action| move |source| ModelError::Io { path: path.to_owned(), action, source };
    let length = regular(path).map_err(io("open it"))?;
    if length > max_bytes {
        let reason = format!("it has {length} bytes, more than the accepted {max_bytes}");
        return Err(ModelError::Json { path: path.to_owned(), reason });
    }
    std::fs::read(path).map_err(io("read it"))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn show(value: &Value) -> String {
    let text = value.to_string();
    if text.len() <= 80 {
        text
    } else {
        format!("{} starting {}…", kind(value), text.chars().take(60).collect::<String>())
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;

    #[test]
    fn a_folder_without_a_config_gets_the_hint_of_its_cause() {
        let name = Path::new("no-such-owner/no-such-model");
        assert!(hint(name, ErrorKind::NotFound).is_some_and(|hint| hint.contains("download")));
        for path in ["/no/such/folder", "/", "no-such-folder", "./no-such-folder", "../no-such-folder"] {
            assert!(
                hint(Path::new(path), ErrorKind::NotFound).is_some_and(|hint| hint.contains("*.safetensors"))
            );
        }
        assert_eq!(hint(name, ErrorKind::PermissionDenied), None);
    }
}
