//! The command line of model calls, as types: keys, providers, ledger, costs, budgets, egress.

use clap::{Args, Subcommand};
use std::path::PathBuf;

/// `ks key`. A key is read from standard input or asked for; never an argument.
#[derive(Debug, Subcommand)]
pub enum Key {
    /// Store a provider's key on the node, sealed; sessions use it and never see it
    Add {
        /// openai, anthropic, gemini, or one of `ks provider ls`
        provider: String,
    },
    /// List keys by fingerprint
    #[command(alias = "list")]
    Ls,
    /// Delete a provider's key
    Rm {
        /// Provider
        provider: String,
    },
    /// Ask the provider for its models with the key, which costs nothing
    Test {
        /// Provider
        provider: String,
    },
}

/// `ks provider`.
#[derive(Debug, Subcommand)]
pub enum Provider {
    /// Add or replace a provider of models
    Add {
        /// First part of the path in the session: http://127.0.0.1:4180/NAME
        name: String,
        /// Whose API it speaks
        #[arg(long, value_parser = ["openai", "anthropic", "gemini"])]
        dialect: String,
        /// https://HOST[:PORT][/PREFIX]; http:// only to this machine
        #[arg(long, value_name = "URL")]
        base_url: String,
        /// It knows stream_options.include_usage: usage of streams is asked for, and hidden from who did not
        #[arg(long)]
        include_usage: bool,
        /// Trust the certificates in this PEM file instead of the public ones
        #[arg(long, value_name = "FILE")]
        ca: Option<PathBuf>,
    },
    /// List providers
    #[command(alias = "list")]
    Ls,
    /// Delete an added provider
    Rm {
        /// Name
        name: String,
    },
}

/// `ks ledger`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Ledger {
    /// Session name or id
    pub session: Option<String>,
    /// Comma-separated values
    #[arg(long)]
    pub csv: bool,
    /// The journal's own lines, as they are
    #[arg(long, conflicts_with = "csv")]
    pub raw: bool,
    #[command(subcommand)]
    pub act: Option<LedgerAct>,
}

/// What else can be done with a ledger.
#[derive(Debug, Subcommand)]
pub enum LedgerAct {
    /// Check the hash chain and the sums; exit 1 when they do not hold
    Verify {
        /// Session name or id
        session: String,
        /// Its forks too
        #[arg(long)]
        tree: bool,
    },
    /// Compare with a provider's usage export (CSV or JSON) of this session and its forks
    Reconcile {
        /// Session name or id
        session: String,
        /// The export
        file: PathBuf,
        /// Whose export it is
        #[arg(long)]
        provider: String,
        /// Append what it says of unknown calls to the ledger
        #[arg(long)]
        apply: bool,
    },
    /// Say what became of a call whose end is unknown
    Resolve {
        /// Session name or id
        session: String,
        /// The call's number in `ks ledger`
        seq: u64,
        /// billed or not-billed
        #[arg(long, value_parser = ["billed", "not-billed"])]
        outcome: String,
        /// Dollars, if it was billed
        #[arg(long)]
        cost: Option<String>,
        /// In words
        #[arg(long, default_value = "")]
        note: String,
    },
}

/// `ks cost`.
#[derive(Debug, Args)]
pub struct Cost {
    /// Session name or id; all sessions without it
    pub session: Option<String>,
    /// Its forks too, and their sum
    #[arg(long, requires = "session")]
    pub tree: bool,
    /// What a line is
    #[arg(long, value_parser = ["session", "day", "model"], default_value = "session")]
    pub by: String,
}

/// `ks budget`.
#[derive(Debug, Subcommand)]
pub enum Budget {
    /// Limit what may be spent: of one session, or of all together
    Set {
        /// Dollars, as 12 or 12.50
        dollars: String,
        /// Only this session
        #[arg(long)]
        session: Option<String>,
    },
    /// Take a limit away
    Rm {
        /// Only this session's
        #[arg(long)]
        session: Option<String>,
    },
    /// List limits and what is spent and reserved of them
    #[command(alias = "list")]
    Ls,
}

/// `ks egress`. Nothing may be reached unless it is allowed.
#[derive(Debug, Subcommand)]
pub enum Egress {
    /// Let a session reach hosts: HOST, HOST:PORT, *.DOMAIN, or an address
    Allow {
        /// Session name or id
        session: String,
        /// Hosts
        #[arg(required = true)]
        hosts: Vec<String>,
    },
    /// Take hosts off the list
    Deny {
        /// Session name or id
        session: String,
        /// Hosts, as they were allowed
        #[arg(required = true)]
        hosts: Vec<String>,
    },
    /// List what a session may reach
    #[command(alias = "list")]
    Ls {
        /// Session name or id
        session: String,
    },
}
