//! Chat templates: Jinja as Hugging Face's tools render it.

use std::collections::BTreeMap;
use std::path::Path;

use minijinja::syntax::SyntaxConfig;
pub use minijinja::value::Value as TemplateValue;
use minijinja::{Environment, ErrorKind};
use serde_json::Value;

use super::json::{parse_optional, read_optional};
use super::json_filter::to_json;
use super::Message;
use crate::{Error, Result};

const NAME: &str = "chat";

/// What a chat template is given beside the messages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TemplateOptions {
    /// Definitions of tools, as the template expects them (OpenAI's schema for Qwen). Parse them from JSON text with
    /// `serde_json::from_str`, which keeps the order of their fields.
    pub tools: Vec<TemplateValue>,
    /// Whether the model thinks before it answers; the template's own default if `None`.
    pub enable_thinking: Option<bool>,
    /// Whether special tokens written in messages and tool definitions count as such. Off, nobody can end a turn by writing
    /// `<|im_end|>`, in whatever field. `variables` are the application's own and always count.
    pub special_tokens: bool,
    /// Further variables.
    pub variables: BTreeMap<String, TemplateValue>,
}

/// A model's chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: Option<String>,
    eos_token: Option<String>,
}

impl ChatTemplate {
    /// Reads `chat_template.jinja`, or else the template of `tokenizer_config.json`.
    pub fn read(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let file = dir.join("tokenizer_config.json");
        let config = parse_optional(&file)?.unwrap_or(Value::Null);
        let source = match read_optional(&dir.join("chat_template.jinja"))? {
            Some(source) => source,
            None => template_of(&config).ok_or_else(|| {
                Error::Template(format!(
                    "{} has neither chat_template.jinja nor a chat_template in tokenizer_config.json; use a chat model",
                    dir.display()
                ))
            })?,
        };
        let mut template = Self::parse(source)?;
        template.bos_token = special_token(&config, "bos_token");
        template.eos_token = special_token(&config, "eos_token");
        Ok(template)
    }

    /// Parses a template.
    pub fn parse(source: impl Into<String>) -> Result<Self> {
        let mut environment = Environment::new();
        // What transformers sets.
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(template_error)?;
        environment.set_syntax(syntax);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| {
            Err::<String, _>(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_filter("tojson", to_json);
        environment
            .add_template_owned(NAME, source.into())
            .map_err(template_error)?;
        Ok(Self {
            environment,
            bos_token: None,
            eos_token: None,
        })
    }

    /// The token text that ends a turn, as `tokenizer_config.json` names it.
    pub fn eos_token(&self) -> Option<&str> {
        self.eos_token.as_deref()
    }

    /// Renders a conversation, ready for the assistant's answer.
    pub fn render(&self, messages: &[Message]) -> Result<String> {
        self.render_with(messages, &TemplateOptions::default())
    }

    /// [`ChatTemplate::render`] with tools, thinking and other variables.
    pub fn render_with(&self, messages: &[Message], options: &TemplateOptions) -> Result<String> {
        let message = |message: &Message| {
            let own = [
                ("role".to_string(), TemplateValue::from(&*message.role)),
                (
                    "content".to_string(),
                    TemplateValue::from(&*message.content),
                ),
            ];
            let extra = message.extra.iter().map(|(k, v)| (k.clone(), v.clone()));
            TemplateValue::from_pairs(own.into_iter().chain(extra))
        };
        let messages: Vec<TemplateValue> = messages.iter().map(message).collect();
        let tools = match options.tools.is_empty() {
            true => TemplateValue::from(()),
            false => TemplateValue::from(options.tools.clone()),
        };
        let own = [
            ("messages", Some(TemplateValue::from(messages))),
            ("tools", Some(tools)),
            ("add_generation_prompt", Some(TemplateValue::from(true))),
            (
                "bos_token",
                Some(TemplateValue::from(self.bos_token.clone())),
            ),
            (
                "eos_token",
                Some(TemplateValue::from(self.eos_token.clone())),
            ),
            (
                "enable_thinking",
                options.enable_thinking.map(TemplateValue::from),
            ),
        ];
        let own = own
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_string(), value?)));
        let variables = options
            .variables
            .iter()
            .map(|(k, v)| (k.clone(), v.clone()));
        let variables = TemplateValue::from_pairs(own.chain(variables));
        self.environment
            .get_template(NAME)
            .and_then(|template| template.render(variables))
            .map_err(template_error)
    }
}

fn template_error(error: minijinja::Error) -> Error {
    // minijinja's debug form has several lines; its display form has one.
    Error::Template(error.to_string().replace('\n', " "))
}

fn template_of(config: &Value) -> Option<String> {
    match config.get("chat_template")? {
        Value::String(source) => Some(source.clone()),
        Value::Array(named) => named
            .iter()
            .find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"))?
            .get("template")?
            .as_str()
            .map(String::from),
        _ => None,
    }
}

fn special_token(config: &Value, name: &str) -> Option<String> {
    let value = config.get(name)?;
    value
        .as_str()
        .or_else(|| value.get("content")?.as_str())
        .map(String::from)
}
