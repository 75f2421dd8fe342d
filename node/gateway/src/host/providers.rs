//! The providers a guest may name: three that come with the program, and what an operator added.
//!
//! Added ones are kept in `providers.json`. A base URL is `https://`, or `http://` to a loopback address, so that no key leaves
//! this machine in the clear.

use ks_proto::gateway::Provider;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// Providers at most.
const PROVIDERS_MAX: usize = 64;

/// Why a provider was not taken, in words for its operator.
#[derive(Debug, thiserror::Error)]
pub enum ProviderError {
    /// It cannot be one.
    #[error("{0}")]
    Bad(String),
    /// It came with the program.
    #[error("{0} comes with the program: an added provider of another name can have its dialect and another base URL")]
    Builtin(String),
    /// The disk.
    #[error("cannot {doing} {path}")]
    Io {
        /// "read" or "write".
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// All providers of one node, by name.
pub struct Providers {
    path: PathBuf,
    all: BTreeMap<String, Provider>,
}

fn builtin() -> Vec<Provider> {
    let make = |name: &str, base_url: &str, include_usage| Provider {
        name: name.to_owned(),
        dialect: name.to_owned(),
        base_url: base_url.to_owned(),
        include_usage,
        ca_pem: None,
        builtin: true,
    };
    vec![
        make("openai", "https://api.openai.com", true),
        make("anthropic", "https://api.anthropic.com", false),
        make("gemini", "https://generativelanguage.googleapis.com", false),
    ]
}

impl Providers {
    /// The built-in ones and those of `dir/providers.json`.
    ///
    /// # Errors
    /// If that file cannot be read.
    pub fn open(dir: &Path) -> Result<Self, ProviderError> {
        let path = dir.join("providers.json");
        let mut all: BTreeMap<String, Provider> = builtin().into_iter().map(|p| (p.name.clone(), p)).collect();
        let failed = |source| ProviderError::Io { doing: "read", path: path.clone(), source };
        match std::fs::read(&path) {
            Ok(bytes) => {
                let added: Vec<Provider> = serde_json::from_slice(&bytes).map_err(|e| failed(e.into()))?;
                all.extend(added.into_iter().map(|p| (p.name.clone(), p)));
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(failed(e)),
        }
        Ok(Self { path, all })
    }

    /// By name.
    pub fn get(&self, name: &str) -> Option<&Provider> {
        self.all.get(name)
    }

    /// All, by name.
    pub fn list(&self) -> Vec<Provider> {
        self.all.values().cloned().collect()
    }

    /// Adds or replaces one. A built-in one is replaced too (a test provider, a company's own front), and comes back when the
    /// replacement is removed.
    ///
    /// # Errors
    /// If it cannot be one or the disk refuses.
    pub fn add(&mut self, mut provider: Provider) -> Result<(), ProviderError> {
        check(&provider)?;
        if self.all.len() >= PROVIDERS_MAX && !self.all.contains_key(&provider.name) {
            return Err(ProviderError::Bad(format!("there are {PROVIDERS_MAX} providers already; remove one first")));
        }
        provider.builtin = false;
        provider.base_url = provider.base_url.trim_end_matches('/').to_owned();
        let name = provider.name.clone();
        let before = self.all.insert(name.clone(), provider);
        self.store().inspect_err(|_| self.put_back(&name, before))
    }

    /// Drops an added one; a built-in of its name comes back.
    ///
    /// # Errors
    /// If there is none, it is built in, or the disk refuses.
    pub fn remove(&mut self, name: &str) -> Result<(), ProviderError> {
        match self.all.get(name) {
            None => return Err(ProviderError::Bad(format!("there is no provider {name}"))),
            Some(p) if p.builtin => return Err(ProviderError::Builtin(name.to_owned())),
            Some(_) => {}
        }
        let before = self.all.remove(name);
        if let Some(own) = builtin().into_iter().find(|p| p.name == name) {
            self.all.insert(name.to_owned(), own);
        }
        self.store().inspect_err(|_| self.put_back(name, before))
    }

    fn put_back(&mut self, name: &str, before: Option<Provider>) {
        match before {
            Some(old) => self.all.insert(name.to_owned(), old),
            None => self.all.remove(name),
        };
    }

    fn store(&self) -> Result<(), ProviderError> {
        let failed = |source| ProviderError::Io { doing: "write", path: self.path.clone(), source };
        let added: Vec<&Provider> = self.all.values().filter(|p| !p.builtin).collect();
        let bytes = serde_json::to_vec_pretty(&added).map_err(|e| failed(e.into()))?;
        super::files::write_atomic(&self.path, &bytes).map_err(failed)
    }
}

fn check(p: &Provider) -> Result<(), ProviderError> {
    let bad = |why: String| Err(ProviderError::Bad(why));
    let name_ok = (1..=64).contains(&p.name.len())
        && p.name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_');
    if !name_ok {
        return bad(format!("{:?} is not a name of a provider: 1-64 of a-z, 0-9, '-' and '_'", p.name));
    }
    if !["openai", "anthropic", "gemini"].contains(&p.dialect.as_str()) {
        return bad(format!("{:?} is not a dialect: use openai, anthropic or gemini", p.dialect));
    }
    let Ok(uri) = p.base_url.parse::<hyper::Uri>() else { return bad(format!("{:?} is not a URL", p.base_url)) };
    let host = uri.host().unwrap_or_default();
    let loopback =
        host == "localhost" || host.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok_and(|a| a.is_loopback());
    let scheme_ok = match uri.scheme_str() {
        Some("https") => true,
        Some("http") => loopback,
        Some(_) | None => false,
    };
    if host.is_empty() || !scheme_ok || uri.query().is_some() {
        return bad(format!("{:?} is not a base URL: https://HOST[:PORT][/PATH], or http:// to a loopback address", p.base_url));
    }
    if uri.authority().is_some_and(|a| a.as_str().contains('@')) {
        return bad("a base URL holds no user or password: keys belong into the vault".to_owned());
    }
    match &p.ca_pem {
        Some(pem) => super::tls::roots(Some(pem)).map(|_| ()).map_err(|e| ProviderError::Bad(e.to_string())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn provider(name: &str, base_url: &str) -> Provider {
        Provider {
            name: name.into(),
            dialect: "openai".into(),
            base_url: base_url.into(),
            include_usage: true,
            ca_pem: None,
            builtin: false,
        }
    }

    #[test]
    fn added_providers_are_kept_and_no_key_leaves_in_the_clear() {
        let dir = tempfile::tempdir().unwrap();
        let mut p = Providers::open(dir.path()).unwrap();
        p.add(provider("local", "http://127.0.0.1:8000/v1/")).unwrap();
        p.add(provider("openai", "https://front.example")).unwrap();
        for bad in ["http://example.com", "ftp://example.com", "https://", "https://u:p@example.com", "https://a/?x=1", "x"] {
            assert!(p.add(provider("bad", bad)).is_err(), "{bad}");
        }
        assert!(p.add(provider("Bad Name", "https://example.com")).is_err());
        let mut p = Providers::open(dir.path()).unwrap();
        assert_eq!(p.get("local").unwrap().base_url, "http://127.0.0.1:8000/v1");
        assert_eq!(p.get("openai").unwrap().base_url, "https://front.example");
        p.remove("openai").unwrap();
        assert_eq!(p.get("openai").unwrap().base_url, "https://api.openai.com");
        assert!(matches!(p.remove("openai"), Err(ProviderError::Builtin(_))));
    }
}
