//! `generation_config.json`: which tokens end an answer, and how its writer recommends to sample.

use std::path::Path;

use serde_json::Value;

use super::json::parse_optional;
use crate::mtp::Sampling;
use crate::{Error, Result};

/// What a model's `generation_config.json` says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// The tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// Temperature, `top_k`, `top_p`, `min_p` and repetition penalty; greedy where `do_sample` is not true, as in transformers.
    /// What the file leaves out is off. Nothing uses it unless asked: options are greedy by default.
    pub sampling: Sampling,
}

impl GenerationConfig {
    /// Reads the file of a model's folder; a missing file gives the default.
    pub fn read(dir: impl AsRef<Path>) -> Result<Self> {
        let file = dir.as_ref().join("generation_config.json");
        let Some(value) = parse_optional(&file)? else {
            return Ok(Self::default());
        };
        let fields = Fields {
            value: &value,
            file: &file,
        };
        Ok(Self {
            eos_token_ids: fields.eos()?,
            sampling: fields.sampling()?,
        })
    }
}

struct Fields<'a> {
    value: &'a Value,
    file: &'a Path,
}

impl Fields<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.value.get(name).filter(|value| !value.is_null())
    }

    fn eos(&self) -> Result<Vec<u32>> {
        let malformed =
            || Error::config(self.file, "eos_token_id is neither an id nor a list of ids");
        let id = |value: &Value| {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(malformed)
        };
        match self.get("eos_token_id") {
            None => Ok(Vec::new()),
            Some(Value::Array(ids)) => ids.iter().map(id).collect(),
            Some(one) => Ok(vec![id(one)?]),
        }
    }

    fn sampling(&self) -> Result<Sampling> {
        let mut sampling = Sampling {
            repetition_penalty: self.number("repetition_penalty")?.unwrap_or(1.0),
            ..Default::default()
        };
        let sample = match self.get("do_sample") {
            None => false,
            Some(value) => (value.as_bool())
                .ok_or_else(|| Error::config(self.file, "do_sample is neither true nor false"))?,
        };
        if sample {
            sampling.temperature = self.number("temperature")?.unwrap_or(1.0);
            sampling.top_p = self.number("top_p")?.unwrap_or(1.0);
            sampling.min_p = self.number("min_p")?.unwrap_or(0.0);
            sampling.top_k = match self.get("top_k") {
                None => 0,
                Some(value) => (value.as_u64())
                    .ok_or_else(|| Error::config(self.file, "top_k is not a whole number"))?
                    as usize,
            };
        }
        let out_of_range = |e: Error| Error::config(self.file, e.to_string());
        sampling.validate().map_err(out_of_range)?;
        Ok(sampling)
    }

    fn number(&self, name: &str) -> Result<Option<f32>> {
        let number = |value: &Value| {
            let number = value.as_f64().map(|number| number as f32);
            number.ok_or_else(|| Error::config(self.file, format!("{name} is not a number")))
        };
        self.get(name).map(number).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<GenerationConfig> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("generation_config.json"), text).unwrap();
        GenerationConfig::read(dir.path())
    }

    #[test]
    fn recommended_sampling_is_read() {
        let config = read(
            r#"{"do_sample": true, "eos_token_id": [5, 6], "temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": null}"#,
        );
        let config = config.unwrap();
        assert_eq!(config.eos_token_ids, [5, 6]);
        let expected = Sampling {
            temperature: 0.7,
            top_k: 20,
            top_p: 0.95,
            ..Default::default()
        };
        assert_eq!(config.sampling, expected);
    }

    #[test]
    fn without_do_sample_it_is_greedy() {
        for text in [
            r#"{"temperature": 0.7, "top_k": 20}"#,
            r#"{"do_sample": false, "temperature": 0.7}"#,
            "{}",
        ] {
            assert_eq!(read(text).unwrap().sampling, Sampling::default());
        }
        let penalty = read(r#"{"repetition_penalty": 1.1}"#).unwrap().sampling;
        assert_eq!(
            (penalty.repetition_penalty, penalty.temperature),
            (1.1, 0.0)
        );
    }

    #[test]
    fn malformed_fields_are_named() {
        for (text, name) in [
            (r#"{"do_sample": "yes"}"#, "do_sample"),
            (r#"{"do_sample": true, "top_k": -1}"#, "top_k"),
            (
                r#"{"do_sample": true, "temperature": "hot"}"#,
                "temperature",
            ),
            (r#"{"do_sample": true, "top_p": 7}"#, "top-p"),
            (r#"{"eos_token_id": [-1]}"#, "eos_token_id"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(
                error.contains(name) && error.contains("generation_config.json"),
                "{error}"
            );
        }
    }
}
