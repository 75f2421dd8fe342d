//! Settings: flag, then KS_* environment, then .ks.toml of the project, then the user's configuration. Pure; the files'
//! texts and the environment are arguments.
//!
//! A project's file comes with the code of strangers: it may choose sizes, never where the node is or which token is
//! shown to it.

use crate::failure::{Failure, Res};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// One layer. Every field is optional.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Layer {
    /// The node, or several nodes of one fleet with commas between them: `HOST:PORT` or URLs.
    pub address: Option<String>,
    /// Bearer token for `address`.
    pub token: Option<String>,
    /// Fingerprint of the fleet that `address` belongs to; with it the nodes are spoken to by HTTPS.
    pub fingerprint: Option<String>,
    /// A context by name (never from a file: `ks context use` is for that).
    #[serde(skip)]
    pub context: Option<String>,
    /// Where the node's api.json lies.
    pub api_file: Option<PathBuf>,
    /// `auto`, `kvm` or `qemu`.
    pub engine: Option<String>,
    /// Image name.
    pub image: Option<String>,
    /// MiB.
    pub memory_mib: Option<u64>,
    /// Virtual CPUs.
    pub vcpus: Option<u16>,
    /// Seconds between checkpoints.
    pub cadence_s: Option<u64>,
    /// Idle seconds before parking.
    pub idle_park_s: Option<u64>,
}

impl Layer {
    /// This layer's settings, and `below`'s where it has none.
    pub fn over(self, below: Layer) -> Layer {
        // An address and a token belong together: a token is never shown to an address of another layer.
        // A context is an address with all that belongs to it.
        let placed = self.address.is_some() || self.context.is_some();
        let (address, context) = if placed { (self.address, self.context) } else { (below.address, below.context) };
        let token = if placed { self.token } else { self.token.or(below.token) };
        let fingerprint = if placed { self.fingerprint } else { self.fingerprint.or(below.fingerprint) };
        Layer {
            token,
            address,
            fingerprint,
            context,
            api_file: self.api_file.or(below.api_file),
            engine: self.engine.or(below.engine),
            image: self.image.or(below.image),
            memory_mib: self.memory_mib.or(below.memory_mib),
            vcpus: self.vcpus.or(below.vcpus),
            cadence_s: self.cadence_s.or(below.cadence_s),
            idle_park_s: self.idle_park_s.or(below.idle_park_s),
        }
    }
    /// The user's configuration file.
    pub fn user(path: &Path, text: &str) -> Res<Layer> {
        toml::from_str(text).map_err(|e| bad_file(path, &e.to_string()))
    }
    /// A project's .ks.toml.
    pub fn project(path: &Path, text: &str) -> Res<Layer> {
        let layer = Self::user(path, text)?;
        if layer.address.is_some() || layer.token.is_some() || layer.fingerprint.is_some() || layer.api_file.is_some() {
            return Err(Failure::usage(
                format!("{} may not say where the node is", path.display()),
                "address, token, fingerprint and api_file in a project's file would send your token where its author likes",
                "move them to the user configuration (`ks help config`)",
            ));
        }
        Ok(layer)
    }
    /// The KS_* environment.
    pub fn env(get: impl Fn(&str) -> Option<String>) -> Res<Layer> {
        let text = |k: &str| get(k).filter(|v| !v.is_empty());
        Ok(Layer {
            address: text("KS_ADDR"),
            token: text("KS_TOKEN"),
            fingerprint: text("KS_FINGERPRINT"),
            context: text("KS_CONTEXT"),
            api_file: text("KS_API_FILE").map(PathBuf::from),
            engine: text("KS_ENGINE"),
            image: text("KS_IMAGE"),
            memory_mib: number(&text, "KS_MEMORY")?,
            vcpus: number(&text, "KS_VCPUS")?,
            cadence_s: number(&text, "KS_CADENCE")?,
            idle_park_s: number(&text, "KS_IDLE_PARK")?,
        })
    }
}

fn number<T: std::str::FromStr>(text: &impl Fn(&str) -> Option<String>, key: &str) -> Res<Option<T>> {
    text(key)
        .map(|v| {
            v.parse().map_err(|_| {
                Failure::usage(
                    format!("{key}={v:?} is no number"),
                    "a whole number is expected",
                    format!("set {key} right or unset it"),
                )
            })
        })
        .transpose()
}

fn bad_file(path: &Path, why: &str) -> Failure {
    let next = "settings are address, token, fingerprint, api_file, engine, image, memory_mib, vcpus, cadence_s, idle_park_s; see `ks help config`";
    Failure::usage(format!("cannot read {}", path.display()), why.trim().replace('\n', "\n    "), next)
}

/// The folder of the node on this machine: KS_HOME, else $XDG_DATA_HOME/keepstate, else ~/.local/share/keepstate.
pub fn data_dir(get: impl Fn(&str) -> Option<String>) -> PathBuf {
    let text = |k: &str| get(k).filter(|v| !v.is_empty());
    if let Some(h) = text("KS_HOME") {
        return h.into();
    }
    let base = text("XDG_DATA_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let base = base.unwrap_or_else(|| PathBuf::from(text("HOME").unwrap_or_else(|| "/".into())).join(".local/share"));
    base.join("keepstate")
}

/// The user's configuration file: $XDG_CONFIG_HOME/keepstate/config.toml, else below ~/.config.
pub fn user_file(get: impl Fn(&str) -> Option<String>) -> PathBuf {
    let text = |k: &str| get(k).filter(|v| !v.is_empty());
    let base = text("XDG_CONFIG_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let base = base.unwrap_or_else(|| PathBuf::from(text("HOME").unwrap_or_else(|| "/".into())).join(".config"));
    base.join("keepstate/config.toml")
}

/// Where a node's API listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// HTTPS? None when the text did not say.
    pub tls: Option<bool>,
    /// `HOST:PORT`; IPv6 in brackets.
    pub host: String,
}

impl Address {
    /// Reads `HOST:PORT`, `http://HOST:PORT` or `https://HOST:PORT`.
    pub fn read(address: &str) -> Res<Self> {
        let bad = |why: &str| {
            Failure::usage(format!("{address:?} is no address of a node"), why, "write HOST:PORT, as in 127.0.0.1:7700")
        };
        let (tls, rest) = match address.split_once("://") {
            Some(("http", rest)) => (Some(false), rest),
            Some(("https", rest)) => (Some(true), rest),
            Some((scheme, _)) => return Err(bad(&format!("{scheme}:// is not spoken here, only http:// and https://"))),
            None => (None, address),
        };
        let host = rest.trim_end_matches('/');
        let (name, port) = host.rsplit_once(':').unwrap_or_default();
        if host.contains(['/', '@', '?', '#', ' ', ',']) || host.bytes().any(|b| b.is_ascii_control()) {
            return Err(bad("it has a path, a user or odd characters"));
        }
        if port.parse::<u16>().is_err() {
            return Err(bad("it has no port"));
        }
        if name.is_empty() || (name.contains(':') && !name.starts_with('[')) {
            return Err(bad("its host is missing, or an IPv6 address without brackets"));
        }
        Ok(Self { tls, host: host.to_owned() })
    }
    /// Reads a list with commas; at least one.
    pub fn list(text: &str) -> Res<Vec<Self>> {
        text.split(',').map(str::trim).map(Self::read).collect()
    }
    /// As a URL without a final slash; what the text did not say is as told.
    pub fn url(&self, tls: bool) -> String {
        let scheme = if self.tls.unwrap_or(tls) { "https" } else { "http" };
        format!("{scheme}://{}", self.host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn p() -> &'static Path {
        Path::new("/x/.ks.toml")
    }

    #[test]
    fn upper_layers_win_field_by_field() {
        let flag = Layer { engine: Some("kvm".into()), ..Layer::default() };
        let env = Layer::env(|k| (k == "KS_MEMORY").then(|| "512".into())).unwrap();
        let project = Layer::project(p(), "memory_mib = 1024\ncadence_s = 0").unwrap();
        let user = Layer::user(p(), "engine = \"qemu\"\ncadence_s = 30\nvcpus = 2").unwrap();
        let got = flag.over(env).over(project).over(user);
        assert_eq!((got.engine.as_deref(), got.memory_mib, got.cadence_s, got.vcpus), (Some("kvm"), Some(512), Some(0), Some(2)));
    }

    #[test]
    fn a_token_is_never_shown_to_an_address_of_another_layer() {
        let flag = Layer { address: Some("other:1".into()), ..Layer::default() };
        let user = Layer::user(p(), "address = \"mine:1\"\ntoken = \"secret\"").unwrap();
        assert_eq!(flag.over(user.clone()).token, None);
        assert_eq!(Layer::default().over(user).token.as_deref(), Some("secret"));
    }

    #[test]
    fn bad_files_and_values_are_named() {
        let e = Layer::user(p(), "memory = 5").unwrap_err();
        assert!(e.exit == 2 && e.error.what.contains(".ks.toml") && e.error.why.contains("memory"), "{e:?}");
        for text in ["address = \"evil:1\"", "token = \"x\"", "fingerprint = \"x\"", "api_file = \"/x\""] {
            assert_eq!(Layer::project(p(), text).unwrap_err().exit, 2, "{text}");
        }
        let e = Layer::env(|k| (k == "KS_CADENCE").then(|| "soon".into())).unwrap_err();
        assert!(e.error.what.contains("KS_CADENCE"));
    }

    #[test]
    fn folders_follow_xdg() {
        let get = |pairs: &'static [(&str, &str)]| move |k: &str| pairs.iter().find(|p| p.0 == k).map(|p| p.1.to_owned());
        assert_eq!(data_dir(get(&[("KS_HOME", "/k"), ("HOME", "/h")])), PathBuf::from("/k"));
        assert_eq!(data_dir(get(&[("XDG_DATA_HOME", "/d"), ("HOME", "/h")])), PathBuf::from("/d/keepstate"));
        assert_eq!(data_dir(get(&[("XDG_DATA_HOME", "rel"), ("HOME", "/h")])), PathBuf::from("/h/.local/share/keepstate"));
        assert_eq!(user_file(get(&[("HOME", "/h")])), PathBuf::from("/h/.config/keepstate/config.toml"));
    }

    #[test]
    fn addresses() {
        assert_eq!(Address::read("127.0.0.1:7700").unwrap().url(false), "http://127.0.0.1:7700");
        assert_eq!(Address::read("127.0.0.1:7700").unwrap().url(true), "https://127.0.0.1:7700");
        assert_eq!(Address::read("http://[::1]:80/").unwrap().url(true), "http://[::1]:80");
        let two = Address::list("a:1, https://b:2/").unwrap();
        assert_eq!(two.iter().map(|a| a.host.as_str()).collect::<Vec<_>>(), ["a:1", "b:2"]);
        for bad in ["", "localhost", "ftp://a:1", "a:b", "a:1/x", "u@a:1", "a:1?x", "::1:7", ":7", "a:1,,b:2"] {
            assert_eq!(Address::list(bad).unwrap_err().exit, 2, "{bad}");
        }
    }

    #[test]
    fn a_context_and_an_address_push_each_other_out() {
        let env = Layer { context: Some("prod".into()), ..Layer::default() };
        let user = Layer::user(p(), "address = \"mine:1\"\ntoken = \"secret\"\nfingerprint = \"ab\"").unwrap();
        let got = env.clone().over(user.clone());
        assert_eq!((got.address, got.token, got.fingerprint, got.context.as_deref()), (None, None, None, Some("prod")));
        let flag = Layer { address: Some("a:1".into()), ..Layer::default() };
        assert_eq!(flag.over(env).context, None);
        assert_eq!(Layer::default().over(user).fingerprint.as_deref(), Some("ab"));
    }
}
