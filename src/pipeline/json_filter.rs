//! The filter `tojson` as transformers has it: Python's separators, no escapes for HTML. Models were trained on this text.

use std::io::{Result as IoResult, Write};

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// `json.dumps(value, ensure_ascii=False, indent=indent)`.
pub(super) fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let failed =
        |e: &dyn std::fmt::Display| Error::new(ErrorKind::BadSerialization, format!("tojson: {e}"));
    let mut out = vec![];
    match options.get::<Option<usize>>("indent")? {
        None => value.serialize(&mut Serializer::with_formatter(&mut out, OneLine)),
        Some(indent) if indent <= 64 => {
            let indent = vec![b' '; indent];
            let formatter = PrettyFormatter::with_indent(&indent);
            value.serialize(&mut Serializer::with_formatter(&mut out, formatter))
        }
        Some(indent) => return Err(failed(&format!("indent {indent} is more than 64"))),
    }
    .map_err(|e| failed(&e))?;
    let text = String::from_utf8(out).map_err(|e| failed(&e))?;
    Ok(Value::from_safe_string(text))
}

/// `", "` and `": "` between items and after keys.
struct OneLine;

impl OneLine {
    fn separate<W: ?Sized + Write>(writer: &mut W, first: bool) -> IoResult<()> {
        match first {
            true => Ok(()),
            false => writer.write_all(b", "),
        }
    }
}

impl Formatter for OneLine {
    fn begin_array_value<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> IoResult<()> {
        Self::separate(writer, first)
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> IoResult<()> {
        Self::separate(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> IoResult<()> {
        writer.write_all(b": ")
    }
}
