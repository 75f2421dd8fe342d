//! The command line of the fleet, as types: nodes, users, logging in, contexts.

use clap::{Args, Subcommand};
use ks_proto::fleet::Role;

/// `ks node`.
#[derive(Debug, Subcommand)]
pub enum Node {
    /// Make a join token: one use, with an end; carries the fleet's fingerprint and an address
    Token {
        /// How long it is good: 90s, 30m, 1h, 2d
        #[arg(long, default_value = "1h", value_name = "TIME", value_parser = ttl)]
        ttl: u64,
    },
    /// Make the node on this machine a member of the fleet that gave the token
    Join(Join),
    /// List the fleet's nodes
    #[command(alias = "list")]
    Ls,
    /// Show one node in full
    Show {
        /// Name or number
        node: String,
    },
    /// Move a node's sessions to its peers and give it no new ones; goes on if you stop waiting
    Drain {
        /// Name or number
        node: String,
    },
    /// Let a drained or draining node take sessions again
    #[command(visible_alias = "uncordon")]
    Undrain {
        /// Name or number
        node: String,
    },
    /// Take the node on this machine out of its fleet, its sessions first
    Leave {
        /// The fleet cannot be reached, or has removed this node: go without it
        #[arg(long, short)]
        force: bool,
    },
    /// Remove a node for ever: a drained one, or with --force a dead one
    Rm {
        /// Name or number
        node: String,
        /// It is dead and does not come back: its sessions go to its peers
        #[arg(long, short)]
        force: bool,
    },
}

/// `ks node join`.
#[derive(Debug, Args)]
pub struct Join {
    /// The token; - reads it from standard input
    pub token: String,
    /// HOST:PORT of a member, instead of the token's
    #[arg(long, visible_alias = "addr", value_name = "HOST:PORT")]
    pub at: Option<String>,
    /// Name of this node in the fleet; else the host's
    #[arg(long)]
    pub name: Option<String>,
    /// What fails together with it: a rack, a site; copies are spread over these
    #[arg(long)]
    pub domain: Option<String>,
}

/// `ks fleet`.
#[derive(Debug, Subcommand)]
pub enum Blob {
    /// Read every pack now and check it; what is damaged comes from peers again. Exit code 1 if something stays damaged
    Verify {
        /// Name or number of the node whose store it is; else the node that is asked
        #[arg(long, value_name = "NODE")]
        node: Option<String>,
    },
}

#[derive(Debug, Subcommand)]
pub enum Fleet {
    /// Show the fleet: quorum, leader, lease, nodes; exit 1 without a quorum
    Status,
    /// Start a new generation from the node on this machine, when most voters are gone for ever
    Recover {
        /// I know what may be lost
        #[arg(long)]
        yes: bool,
    },
    /// Show or change what holds for the whole fleet
    Policy {
        /// Nodes that must have a checkpoint, its owner included, before it counts as durable
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=16))]
        copies: Option<u16>,
        /// Voters: 1, 3 or 5
        #[arg(long, value_name = "N", value_parser = voters)]
        voters: Option<u16>,
        /// Length of a node's lease
        #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(500..=60_000))]
        lease_ms: Option<u64>,
    },
}

/// `ks user`.
#[derive(Debug, Subcommand)]
pub enum User {
    /// Make a user, or a further token of one; prints the token, once
    Add {
        /// Name: letters, digits, '-' and '.'
        name: String,
        /// admin, user or viewer
        #[arg(long, default_value = "user", value_parser = role)]
        role: Role,
    },
    /// List users
    #[command(alias = "list")]
    Ls,
    /// Delete users and all their tokens
    Rm {
        /// Names
        #[arg(required = true)]
        names: Vec<String>,
    },
}

/// `ks login`. The token is read from standard input or asked for; never an argument.
#[derive(Debug, Args)]
pub struct Login {
    /// HOST:PORT of any node
    pub address: String,
    /// Fingerprint of the fleet, as `ks fleet status` shows it on a node
    #[arg(long, value_name = "HEX")]
    pub fingerprint: Option<String>,
    /// Name of the context; else the host's
    #[arg(long)]
    pub name: Option<String>,
}

/// `ks context`.
#[derive(Debug, Subcommand)]
pub enum Context {
    /// List contexts
    #[command(alias = "list")]
    Ls,
    /// Use this one from now on; local is the node on this machine
    Use {
        /// Name
        name: String,
    },
    /// Forget one, with its token
    Rm {
        /// Name
        name: String,
    },
}

fn role(text: &str) -> Result<Role, String> {
    text.parse()
}

fn voters(text: &str) -> Result<u16, String> {
    match text {
        "1" => Ok(1),
        "3" => Ok(3),
        "5" => Ok(5),
        _ => Err("an even number survives no more than the odd one below it: 1, 3 or 5".into()),
    }
}

/// Longest life of a join token: 30 days.
const TTL_MAX_S: u64 = 30 * 86_400;

/// `90s`, `30m`, `1h`, `2d` or plain seconds.
fn ttl(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        other => return Err(format!("no unit {other:?}: write 90s, 30m, 1h or 2d")),
    };
    let n: u64 = digits.parse().map_err(|_| "write 90s, 30m, 1h or 2d".to_owned())?;
    match n.checked_mul(unit) {
        Some(s) if (1..=TTL_MAX_S).contains(&s) => Ok(s),
        _ => Err("it is between one second and 30 days".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_with_their_units_and_bounded() {
        for (text, s) in [("90", 90), ("90s", 90), ("30m", 1800), ("1h", 3600), ("2d", 172_800), ("30d", TTL_MAX_S)] {
            assert_eq!(ttl(text), Ok(s), "{text}");
        }
        for bad in ["", "h", "0", "-1h", "1w", "31d", "99999999999999999999d", "18446744073709551615d"] {
            assert!(ttl(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_even_number_of_voters_is_refused() {
        assert_eq!((voters("3"), voters("1")), (Ok(3), Ok(1)));
        assert!(voters("2").is_err() && voters("4").is_err() && voters("7").is_err());
    }
}
