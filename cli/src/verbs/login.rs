//! `ks login` and `ks context`: from where, with which certificate and as whom we speak to a fleet.

use super::fleet::addresses;
use crate::args;
use crate::config::Address;
use crate::context::{self, Context, Fingerprint, LOCAL};
use crate::failure::{Failure, Res};
use crate::host::http::Node;
use crate::host::{contexts, terminal, tls};
use crate::output::Ctx;
use crate::table::{Align, Table, clean};
use ks_proto::fleet::FleetInfo;
use serde_json::json;
use std::io::{IsTerminal, Read};
use std::time::Duration;

/// Longest bearer token that is read.
const HIDDEN_MAX: u64 = 4096;

/// Notes a fleet as a context, after a call that proves fingerprint and token.
pub async fn login(ctx: &Ctx, a: args::Login) -> Res<u8> {
    let address = Address::read(&a.address)?;
    if address.tls == Some(false) {
        return Err(Failure::usage(
            "a fleet is spoken to by HTTPS",
            "http:// would show the token to the wire",
            "leave http:// away",
        ));
    }
    let name = match &a.name {
        Some(n) => context::name(n)?,
        None => context::name(
            address.host.rsplit_once(':').map_or("fleet", |h| h.0).trim_matches(['[', ']']).replace(':', "-").as_str(),
        )?,
    };
    let Some(fingerprint) = &a.fingerprint else { return Err(no_fingerprint(&address).await) };
    let fingerprint: Fingerprint = fingerprint.parse()?;
    let token = token(ctx).await?;
    let mut c = Context { addresses: vec![address.host.clone()], fingerprint: fingerprint.to_string(), token };
    let node = Node::in_context(&name, &c)?;
    let info: FleetInfo = node.get("/v1/fleet").await?;
    c.addresses = context::merge(&c.addresses, addresses(&info));
    let path = contexts::file();
    let mut all = contexts::load(&path)?;
    let n = c.addresses.len();
    all.contexts.insert(name.clone(), c);
    all.current = Some(name.clone());
    contexts::save(&path, &all)?;
    let value =
        json!({"schema": "ks.login.v1", "context": name, "fleet_id": info.fleet_id, "addresses": all.contexts[&name].addresses});
    ctx.result(&value, || {
        format!(
            "context {name}: fleet {}, {}\n",
            clean(&info.fleet_id),
            crate::human::count(n as u64, "address").replace("addresss", "addresses")
        )
    })?;
    if ctx.settings.address.is_some() || ctx.home_given {
        ctx.note("note: an address or KS_HOME in your settings still comes before contexts; `--context` names one");
    }
    Ok(0)
}

/// Shows what the node presents: to be compared, not believed.
async fn no_fingerprint(address: &Address) -> Failure {
    let what = "which fleet do you expect there?";
    let next = "`ks fleet status` on a node shows the fingerprint; give it with --fingerprint";
    match presented(&address.host).await {
        Some(f) => Failure::usage(
            what,
            format!("no --fingerprint was given; {} shows {f}", address.host),
            format!("{next} if it is the same"),
        ),
        None => Failure::usage(what, "no --fingerprint was given", next),
    }
}

async fn presented(host: &str) -> Option<Fingerprint> {
    let (config, seen) = tls::looking().ok()?;
    let connect = async {
        let tcp = tokio::net::TcpStream::connect(host).await.ok()?;
        let name = rustls::pki_types::ServerName::try_from(ks_proto::fleet::NODE_SERVER_NAME).ok()?;
        // It ends in an error by design: nothing is believed here.
        let _ = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config)).connect(name, tcp).await;
        seen.authority()
    };
    tokio::time::timeout(Duration::from_secs(5), connect).await.ok().flatten()
}

/// One line from the terminal, not shown. Ctrl-C ends the wait and shows again what is typed.
async fn typed(what: &str) -> Res<String> {
    let quiet = terminal::NoEcho::enter()?;
    eprint!("{what} (not shown): ");
    let read = tokio::task::spawn_blocking(|| {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).map(|_| line)
    });
    let line = read.await.map_err(|e| Failure::local("cannot read the token", e, "report this"))?;
    drop(quiet);
    eprintln!();
    line.map_err(|e| Failure::local("cannot read the token", e, "pipe it in: `ks login ... < FILE`"))
}

/// A word that is not shown, and how to ask for it.
pub struct Hidden<'a> {
    /// `key`, `token`.
    pub noun: &'a str,
    /// What a person is asked for.
    pub prompt: &'a str,
    /// How to give it without being asked.
    pub pipe: &'a str,
    /// Where to get a right one.
    pub source: &'a str,
}

/// From a pipe, or asked for without showing it.
pub async fn hidden(ctx: &Ctx, wanted: Hidden<'_>) -> Res<String> {
    let noun = wanted.noun;
    let text = if std::io::stdin().is_terminal() {
        if !ctx.may_ask {
            return Err(Failure::usage(format!("no {noun}"), "--no-input and --json never ask", wanted.pipe));
        }
        typed(wanted.prompt).await?
    } else {
        let mut text = String::new();
        let read = std::io::stdin().lock().take(HIDDEN_MAX).read_to_string(&mut text);
        let what = format!("cannot read the {noun} from standard input");
        read.map_err(|e| Failure::local(what, e, "pipe it in, or run it in a terminal"))?;
        text
    };
    let word = text.trim();
    if word.is_empty() || !word.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(Failure::usage(format!("this is no {noun}"), "it is empty or has odd characters", wanted.source));
    }
    Ok(word.to_owned())
}

async fn token(ctx: &Ctx) -> Res<String> {
    let pipe = "pipe it in: `ks login ... < FILE`";
    hidden(ctx, Hidden { noun: "token", prompt: "token", pipe, source: "`ks user add NAME` makes one" }).await
}

/// Does what `ks context ...` asks.
pub fn context(ctx: &Ctx, verb: args::Context) -> Res<u8> {
    let path = contexts::file();
    let mut all = contexts::load(&path)?;
    match verb {
        args::Context::Ls => {
            let current = all.in_use().unwrap_or(LOCAL).to_owned();
            // Tokens are not for listings.
            let shown: Vec<_> = all
                .contexts
                .iter()
                .map(|(n, c)| json!({"name": n, "addresses": c.addresses, "fingerprint": c.fingerprint}))
                .collect();
            ctx.result(&json!({"schema": "ks.contexts.v1", "current": current, "contexts": shown}), || {
                let mut t = Table::new(&[
                    ("", Align::Left),
                    ("NAME", Align::Left),
                    ("FINGERPRINT", Align::Left),
                    ("ADDRESSES", Align::Left),
                ]);
                let mark = |n: &str| if n == current { "*".to_owned() } else { String::new() };
                t.row(vec![mark(LOCAL), LOCAL.into(), "-".into(), "the node on this machine".into()]);
                for (n, c) in &all.contexts {
                    let short: String = c.fingerprint.chars().take(16).collect();
                    t.row(vec![mark(n), n.clone(), short, c.addresses.join(", ")]);
                }
                t.render()
            })?;
        }
        args::Context::Use { name } => {
            if name != LOCAL {
                all.named(&name)?;
            }
            all.current = (name != LOCAL).then(|| name.clone());
            contexts::save(&path, &all)?;
            ctx.result(&json!({"schema": "ks.context.v1", "current": name}), || format!("{name} is in use\n"))?;
        }
        args::Context::Rm { name } => {
            all.named(&name)?;
            all.contexts.remove(&name);
            all.current = all.current.filter(|c| *c != name);
            contexts::save(&path, &all)?;
            ctx.result(&json!({"schema": "ks.context-rm.v1", "context": name, "removed": true}), || {
                format!("{name} is forgotten\n")
            })?;
            ctx.note("its token stays good until `ks user rm` on the fleet");
        }
    }
    Ok(0)
}
