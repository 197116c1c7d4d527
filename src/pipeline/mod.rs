//! From a prompt to a stream of text: tokenizer, chat template, SpecPrefill, MTP decoding, usage.
//!
//! Needs the feature `chat`.

mod events;
mod message;
mod options;
mod usage;

#[cfg(feature = "chat")]
mod answer;
#[cfg(feature = "chat")]
mod batch;
#[cfg(feature = "chat")]
mod builder;
#[cfg(feature = "chat")]
mod conversation;
#[cfg(feature = "chat")]
mod generation;
#[cfg(feature = "chat")]
mod generation_config;
#[cfg(feature = "chat")]
mod guard;
#[cfg(feature = "chat")]
mod json;
#[cfg(feature = "chat")]
mod json_filter;
#[cfg(feature = "chat")]
mod memory;
#[cfg(feature = "chat")]
mod past;
#[cfg(feature = "chat")]
mod prefix;
#[cfg(feature = "chat")]
mod reading;
#[cfg(feature = "chat")]
mod rendering;
#[cfg(feature = "chat")]
mod request;
#[cfg(feature = "chat")]
mod spans;
#[cfg(feature = "chat")]
mod template;
#[cfg(feature = "chat")]
mod tokenizer;

pub use events::{Event, Stage};
pub use message::{Message, Prompt};
pub use options::GenerateOptions;
pub use usage::{FinishReason, MtpUsage, SpecPrefillUsage, Usage};

#[cfg(feature = "chat")]
pub use builder::{Builder, SpecPrefillPipeline};
#[cfg(feature = "chat")]
pub use conversation::{Conversation, Turn};
#[cfg(feature = "chat")]
pub use generation::{Completion, Generation};
#[cfg(feature = "chat")]
pub use generation_config::GenerationConfig;
#[cfg(feature = "chat")]
pub use memory::MemoryEstimate;
#[cfg(feature = "chat")]
pub use spans::{RenderedPrompt, Selected};
#[cfg(feature = "chat")]
pub use template::{ChatTemplate, TemplateOptions, TemplateValue};
#[cfg(feature = "chat")]
pub use tokenizer::{Offsets, StreamDecoder, TextTokenizer};
