//! Chat templates: Jinja as Hugging Face's tools render it.

use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value as Jinja;
use minijinja::{context, Environment, ErrorKind};
use serde_json::Value;

use super::json::{parse_optional, read_optional};
use super::Message;
use crate::{Error, Result};

const NAME: &str = "chat";

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
        let messages: Jinja = messages
            .iter()
            .map(|message| {
                let (role, content) = (message.role.as_str(), message.content.as_str());
                context! { role, content }
            })
            .collect::<Vec<Jinja>>()
            .into();
        self.environment
            .get_template(NAME)
            .and_then(|template| {
                template.render(context! {
                    messages => messages.clone(),
                    add_generation_prompt => true,
                    bos_token => self.bos_token.as_deref(),
                    eos_token => self.eos_token.as_deref(),
                })
            })
            .map_err(template_error)
    }

    /// Two renderings that share exactly the leading system and developer messages, or `None` if there are no such
    /// messages or no others. What the prompt has in common with both is the part that no user turn can change.
    pub fn static_renderings(&self, messages: &[Message]) -> Result<Option<[String; 2]>> {
        let leading = messages
            .iter()
            .take_while(|message| matches!(message.role.as_str(), "system" | "developer"))
            .count();
        if leading == 0 || leading == messages.len() {
            return Ok(None);
        }
        let render = |text: &str| {
            let mut probe = messages[..leading].to_vec();
            probe.push(Message::user(text));
            self.render(&probe)
        };
        Ok(Some([render("alpha")?, render("0 omega")?]))
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
