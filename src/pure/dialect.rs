//! Wire dialects: how a path names what is asked for, and in which words errors are told.
//!
//! OpenAI in, OpenAI out is never translated, only watched. This table says for each path what
//! Forebay looks at; what it does not know passes by `match.path` alone.

/// What a path asks for. The order is the order of the metric label.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Endpoint {
    Chat,
    Completions,
    Embeddings,
    Rerank,
    Responses,
    Audio,
    Images,
    Moderations,
    /// Anthropic's Messages API, which vLLM, SGLang and llama.cpp serve as well.
    Messages,
    /// Answered from the plan.
    Models,
    /// Answered without a key.
    Health,
    /// No model in the body: routed by path (`/v1/files`, `/v1/batches`, `/v1/responses/{id}`).
    #[default]
    Other,
}

/// The shape of an error body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Envelope {
    #[default]
    OpenAi,
    Anthropic,
}

impl Endpoint {
    /// Whether an answer is generated token by token.
    pub fn generates(self) -> bool {
        matches!(
            self,
            Endpoint::Chat | Endpoint::Completions | Endpoint::Responses | Endpoint::Messages
        )
    }

    /// By path, without its query. Unknown paths are [`Endpoint::Other`].
    pub fn of(path: &str) -> Endpoint {
        match path {
            "/v1/chat/completions" => Endpoint::Chat,
            "/v1/completions" => Endpoint::Completions,
            "/v1/embeddings" => Endpoint::Embeddings,
            "/v1/rerank" | "/v2/rerank" | "/rerank" | "/v1/score" | "/score" => Endpoint::Rerank,
            "/v1/responses" => Endpoint::Responses,
            "/v1/moderations" => Endpoint::Moderations,
            "/v1/messages" | "/v1/messages/count_tokens" => Endpoint::Messages,
            "/v1/audio/speech" | "/v1/audio/transcriptions" | "/v1/audio/translations" => {
                Endpoint::Audio
            }
            "/v1/images/generations" | "/v1/images/edits" | "/v1/images/variations" => {
                Endpoint::Images
            }
            "/health" | "/healthz" | "/readyz" => Endpoint::Health,
            "/v1/models" => Endpoint::Models,
            _ if path.starts_with("/v1/models/") => Endpoint::Models,
            _ => Endpoint::Other,
        }
    }

    /// Whether the body names the model.
    pub const fn names_model(self) -> bool {
        !matches!(self, Endpoint::Models | Endpoint::Health | Endpoint::Other)
    }

    /// Whether a stream of it reports usage only when `stream_options.include_usage` asks.
    pub const fn reports_usage_on_demand(self) -> bool {
        matches!(self, Endpoint::Chat | Endpoint::Completions)
    }

    pub const fn envelope(self) -> Envelope {
        match self {
            Endpoint::Messages => Envelope::Anthropic,
            _ => Envelope::OpenAi,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Endpoint::Chat => "chat",
            Endpoint::Completions => "completions",
            Endpoint::Embeddings => "embeddings",
            Endpoint::Rerank => "rerank",
            Endpoint::Responses => "responses",
            Endpoint::Audio => "audio",
            Endpoint::Images => "images",
            Endpoint::Moderations => "moderations",
            Endpoint::Messages => "messages",
            Endpoint::Models => "models",
            Endpoint::Health => "health",
            Endpoint::Other => "other",
        }
    }
}

/// The id at the end of a path such as `/v1/responses/{id}` or `/v1/files/{id}/content`: what a
/// client stays on one backend by.
pub fn object_id(path: &str) -> Option<&str> {
    let rest = path.strip_prefix("/v1/")?;
    let (_, after) = rest.split_once('/')?;
    let id = after.split('/').next()?;
    (!id.is_empty()).then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_without_a_model_stay_by_their_id() {
        assert_eq!(object_id("/v1/responses/resp_1"), Some("resp_1"));
        assert_eq!(object_id("/v1/files/f-2/content"), Some("f-2"));
        assert_eq!(object_id("/v1/files"), None);
        assert_eq!(object_id("/v1/files/"), None);
        assert_eq!(object_id("/other/x/y"), None);
    }

    #[test]
    fn every_model_path_is_known_and_only_those_need_a_model() {
        for path in ["/v1/chat/completions", "/v1/embeddings", "/v1/audio/speech", "/v1/messages"] {
            assert!(Endpoint::of(path).names_model(), "{path}");
        }
        for path in ["/v1/files", "/v1/responses/r", "/v1/models", "/health", "/", "/v1/chat"] {
            assert!(!Endpoint::of(path).names_model(), "{path}");
        }
    }
}
