//! Dimensions of published models, and the tensors that follow from them.

use clap::ValueEnum;
use serde_json::{json, Value};

/// A model whose dimensions are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Size {
    /// A few layers, for tests
    Tiny,
    /// The same with 8 experts
    TinyMoe,
    /// 256 experts, 8 of them active, as 35B-A3B, everything else small
    NarrowMoe,
    #[value(name = "0.8b")]
    B08,
    #[value(name = "2b")]
    B2,
    #[value(name = "4b")]
    B4,
    #[value(name = "9b")]
    B9,
    #[value(name = "27b")]
    B27,
    #[value(name = "35b-a3b")]
    B35A3,
}

/// What a model's tensors are sized by.
#[derive(Clone, Debug)]
pub struct Dims {
    pub layers: usize,
    hidden: usize,
    inner: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    value_heads: usize,
    key_heads: usize,
    delta_dim: usize,
    vocab: usize,
    pub tied: bool,
    pub experts: usize,
    active: usize,
    expert_inner: usize,
}

/// How a tensor is filled.
#[derive(Clone, Copy, Debug)]
pub enum Fill {
    /// In `-size..size`.
    Uniform(f32),
    /// Between two values.
    Between(f32, f32),
}

/// A tensor to make.
#[derive(Clone, Debug)]
pub struct Shape {
    pub dims: Vec<usize>,
    pub fill: Fill,
}

const INTERVAL: usize = 4;

impl Size {
    pub fn dims(self) -> Dims {
        let published = Dims {
            layers: 24,
            hidden: 1024,
            inner: 3584,
            heads: 8,
            kv_heads: 2,
            head_dim: 256,
            value_heads: 16,
            key_heads: 16,
            delta_dim: 128,
            vocab: 248_320,
            tied: true,
            experts: 0,
            active: 0,
            expert_inner: 0,
        };
        let tiny = Dims {
            layers: 8,
            hidden: 128,
            inner: 256,
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            value_heads: 4,
            key_heads: 2,
            delta_dim: 32,
            vocab: 512,
            ..published.clone()
        };
        match self {
            Self::Tiny => tiny,
            Self::TinyMoe => Dims {
                experts: 8,
                active: 2,
                expert_inner: 64,
                inner: 64,
                ..tiny
            },
            Self::NarrowMoe => Dims {
                experts: 256,
                active: 8,
                expert_inner: 64,
                inner: 64,
                tied: false,
                ..tiny
            },
            Self::B08 => published,
            Self::B2 => Dims {
                hidden: 2048,
                inner: 6144,
                ..published
            },
            Self::B4 => Dims {
                layers: 32,
                hidden: 2560,
                inner: 9216,
                heads: 16,
                kv_heads: 4,
                value_heads: 32,
                ..published
            },
            Self::B9 => Dims {
                layers: 32,
                hidden: 4096,
                inner: 12288,
                heads: 16,
                kv_heads: 4,
                value_heads: 32,
                tied: false,
                ..published
            },
            Self::B27 => Dims {
                layers: 64,
                hidden: 5120,
                inner: 17408,
                heads: 24,
                kv_heads: 4,
                value_heads: 48,
                tied: false,
                ..published
            },
            Self::B35A3 => Dims {
                layers: 40,
                hidden: 2048,
                inner: 512,
                heads: 16,
                value_heads: 32,
                tied: false,
                experts: 256,
                active: 8,
                expert_inner: 512,
                ..published
            },
        }
    }
}

impl Dims {
    /// All tensors by their Hugging Face names.
    pub fn tensors(&self, flat: bool, mtp: bool) -> Vec<(String, Shape)> {
        let trunk = if flat {
            "model."
        } else {
            "model.language_model."
        };
        let mut all = vec![];
        all.push((
            format!("{trunk}embed_tokens.weight"),
            matrix(self.vocab, self.hidden),
        ));
        all.push((format!("{trunk}norm.weight"), norm(self.hidden)));
        if !self.tied {
            all.push(("lm_head.weight".into(), matrix(self.vocab, self.hidden)));
        }
        for layer in 0..self.layers {
            let attention = (layer + 1) % INTERVAL == 0;
            self.layer(&format!("{trunk}layers.{layer}."), attention, &mut all);
        }
        if mtp {
            all.push(("mtp.fc.weight".into(), matrix(self.hidden, 2 * self.hidden)));
            for name in ["norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"] {
                all.push((format!("mtp.{name}.weight"), norm(self.hidden)));
            }
            self.layer("mtp.layers.0.", true, &mut all);
        }
        all
    }

    fn layer(&self, prefix: &str, attention: bool, all: &mut Vec<(String, Shape)>) {
        let h = self.hidden;
        let mut add = |name: &str, shape: Shape| all.push((format!("{prefix}{name}"), shape));
        add("input_layernorm.weight", norm(h));
        add("post_attention_layernorm.weight", norm(h));
        if attention {
            let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
            add("self_attn.q_proj.weight", matrix(2 * q, h));
            add("self_attn.k_proj.weight", matrix(kv, h));
            add("self_attn.v_proj.weight", matrix(kv, h));
            add("self_attn.o_proj.weight", matrix(h, q));
            add("self_attn.q_norm.weight", norm(self.head_dim));
            add("self_attn.k_norm.weight", norm(self.head_dim));
        } else {
            let (k, v) = (
                self.key_heads * self.delta_dim,
                self.value_heads * self.delta_dim,
            );
            let vector = |n: usize, low: f32, high: f32| Shape {
                dims: vec![n],
                fill: Fill::Between(low, high),
            };
            add("linear_attn.in_proj_qkv.weight", matrix(2 * k + v, h));
            add("linear_attn.in_proj_z.weight", matrix(v, h));
            add("linear_attn.in_proj_a.weight", matrix(self.value_heads, h));
            add("linear_attn.in_proj_b.weight", matrix(self.value_heads, h));
            add("linear_attn.out_proj.weight", matrix(h, v));
            add(
                "linear_attn.conv1d.weight",
                Shape {
                    dims: vec![2 * k + v, 1, 4],
                    fill: Fill::Uniform(0.5),
                },
            );
            add("linear_attn.A_log", vector(self.value_heads, 0.0, 2.7));
            add("linear_attn.dt_bias", vector(self.value_heads, -4.0, 0.0));
            add("linear_attn.norm.weight", vector(self.delta_dim, 0.9, 1.1));
        }
        if self.experts == 0 {
            self.mlp("mlp.", self.inner, &mut add);
            return;
        }
        let (e, i) = (self.experts, self.expert_inner);
        add("mlp.gate.weight", matrix(e, h));
        add("mlp.shared_expert_gate.weight", matrix(1, h));
        self.mlp("mlp.shared_expert.", self.inner, &mut add);
        let stack = |n: usize, k: usize| Shape {
            dims: vec![e, n, k],
            ..matrix(n, k)
        };
        add("mlp.experts.gate_up_proj", stack(2 * i, h));
        add("mlp.experts.down_proj", stack(h, i));
    }

    fn mlp(&self, prefix: &str, inner: usize, add: &mut impl FnMut(&str, Shape)) {
        for name in ["gate_proj", "up_proj"] {
            add(
                &format!("{prefix}{name}.weight"),
                matrix(inner, self.hidden),
            );
        }
        add(
            &format!("{prefix}down_proj.weight"),
            matrix(self.hidden, inner),
        );
    }

    /// `config.json`.
    pub fn config(&self, flat: bool, mtp: bool) -> Value {
        let moe = self.experts > 0;
        let kind = if moe { "qwen3_5_moe" } else { "qwen3_5" };
        let mut text = json!({
            "model_type": format!("{kind}_text"),
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "full_attention_interval": INTERVAL,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.delta_dim,
            "linear_value_head_dim": self.delta_dim,
            "linear_conv_kernel_dim": 4,
            "attn_output_gate": true,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262_144,
            "mtp_num_hidden_layers": mtp as usize,
            "tie_word_embeddings": self.tied,
            "dtype": "bfloat16",
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
                "mrope_interleaved": true, "mrope_section": self.sections(),
            },
        });
        let own = match moe {
            true => json!({
                "num_experts": self.experts, "num_experts_per_tok": self.active,
                "moe_intermediate_size": self.expert_inner, "shared_expert_intermediate_size": self.inner,
            }),
            false => json!({"intermediate_size": self.inner}),
        };
        if let (Some(text), Value::Object(own)) = (text.as_object_mut(), own) {
            text.extend(own);
        }
        match flat {
            true => text,
            false => {
                json!({"model_type": kind, "tie_word_embeddings": self.tied, "text_config": text})
            }
        }
    }

    /// Pairs per axis, as 11, 11, 10 of 32.
    fn sections(&self) -> [usize; 3] {
        let pairs = self.head_dim / 8;
        let third = pairs.div_ceil(3);
        [third, third, pairs - 2 * third]
    }
}

/// Scaled so that a row's size stays about 1 through a layer.
fn matrix(n: usize, k: usize) -> Shape {
    Shape {
        dims: vec![n, k],
        fill: Fill::Uniform((3.0 / k as f32).sqrt()),
    }
}

/// Zero-centred, as Hugging Face stores it.
fn norm(n: usize) -> Shape {
    Shape {
        dims: vec![n],
        fill: Fill::Uniform(0.1),
    }
}
