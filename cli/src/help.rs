//! What `ks` explains: the overview, and topics for `ks help TOPIC`. Pure text.

/// `ks` without arguments: twelve lines, examples first.
pub const OVERVIEW: &str = "\
KeepState: machines for coding agents that survive a crash. First steps:
  ks doctor                              check this machine
  ks up                                  start a node here
  ks run --sync . -- AGENT COMMAND       copy this folder in, run a command, open its terminal
  ks ls ; ks attach NAME                 list sessions; go back into one (Enter ~ d leaves it)
  ks exec NAME -- make test              run a program in it, byte for byte
  ks checkpoint NAME -m \"tests green\"    a point to go back to (ks restore NAME@c7)
  ks fork NAME@c7 -n 3                   three machines that go on from there
  ks kill NAME                           crash it on purpose and see it come back
Look: show checkpoints tree diff logs events ledger   Move: cp park wake stop rm   More: key node fleet user image demo
Every verb: --json --quiet --no-input. `ks VERB --help` has the options.
Topics: ks help config | exit-codes | terminal | sync | checkpoints | models | fleet | one-node | completion
";

/// Topics and their text.
pub const TOPICS: [(&str, &str); 9] = [
    (
        "config",
        "\
Settings, the upper one wins:
  1. options            --address, --context, --engine, --memory, ...
  2. environment        KS_ADDR KS_TOKEN KS_FINGERPRINT KS_CONTEXT KS_API_FILE KS_ENGINE KS_IMAGE KS_MEMORY KS_VCPUS
                        KS_CADENCE KS_IDLE_PARK
  3. .ks.toml           in this folder or one above; sizes and engine only, never an address or a token
  4. user configuration $XDG_CONFIG_HOME/keepstate/config.toml (~/.config/keepstate/config.toml)

  engine = \"auto\"       # auto, kvm or qemu
  image = \"default\"
  memory_mib = 2048
  vcpus = 1
  cadence_s = 60        # seconds between checkpoints; 0 is never
  idle_park_s = 0       # park after so many idle seconds; 0 is never
  address = \"127.0.0.1:7700\"   # user configuration only, like token, fingerprint and api_file

An address may be several with commas between them, all of one fleet. `ks login` notes a fleet as a context instead; a
folder named by KS_HOME or KS_API_FILE comes before the context in use.

The node on this machine is found by api.json in its data folder: KS_HOME, else $XDG_DATA_HOME/keepstate, else
~/.local/share/keepstate. NO_COLOR turns colours off. KS_LIBEXEC names the folder of ksd and its helpers.
",
    ),
    (
        "exit-codes",
        "\
  0      success; also a detach from a terminal
  1      the answer is no (`ks doctor` found something)
  2      usage
  4      not allowed
  124    a deadline passed
  125    ks or the node failed before the command ran (no such session, no node, ...)
  126    the command is not executable      127  the command was not found
  130    interrupted by Ctrl-C (129, 143: told to end by SIGHUP, SIGTERM)
  141    the reader of stdout went away
  255    the link was lost; the outcome is unknown
`ks exec` otherwise passes the program's own code through (128+N when signal N ended it).
With --json an error is one object on stdout: schema ks.error.v1, code, what, why, next, exit.
",
    ),
    (
        "terminal",
        "\
In an attached terminal every key goes to the session, but for these, after Enter:
  ~ d    detach: the session goes on, ks ends with 0
  ~ .    cut the link: for when the far side is dead; ks ends with 255
  ~ ~    one ~
A single ~ is passed on at the next key, or by itself after 0.3 s. Pasted text is never searched for these keys.
When the link is lost or the session comes back from a crash, ks says so in one line and reconnects by itself; keys
typed meanwhile are dropped. Whatever ends ks, the terminal is put back as it was. `ks exec -t` knows ~ . only.
",
    ),
    (
        "sync",
        "\
`ks run --sync DIR` copies DIR to /workspace/<its name> before the command starts. Only named folders travel.
  - What .gitignore skips stays here; git itself decides (so git should be installed). --include PATH carries more.
  - .git comes along without its locks; a linked working tree's commits come as a repository of their own.
  - Links are copied as text and never followed; pipes, sockets and devices stay here.
  - `ks run --plan --sync DIR` only shows the plan.
Single files: `ks cp FILE SESSION:PATH` and back. `ks cp SESSION:PATH DIR` never writes outside DIR.
",
    ),
    (
        "checkpoints",
        "\
A checkpoint holds memory, disk and devices of one instant, and is named c1, c2, ... in its session.
  ks checkpoint S -m NOTE [--pin]   now, while it runs        ks checkpoints S    list
  ks restore S@c7                   put S back                ks diff S@c3 c7     files that differ
  ks fork S@c7 -n 3                 new sessions from it      ks tree S           the family
  ks park S ; ks wake S             give memory and CPU back, and take them again
They are also taken by themselves every --cadence seconds. Going back keeps what was there as one more checkpoint, whose
number `ks restore` prints: restore that one to be where you were. To go on from both at once, fork instead.
",
    ),
    (
        "completion",
        "\
  bash   echo 'source <(ks completion bash)' >> ~/.bashrc
  zsh    echo 'source <(ks completion zsh)' >> ~/.zshrc
  fish   ks completion fish > ~/.config/fish/completions/ks.fish
Session names complete too, while the node answers. Man page: ks man > ks.1
",
    ),
    (
        "fleet",
        "\
Machines that hold each other's checkpoints: when one dies, its sessions go on at a peer.
  ks up --fleet-address IP          on each machine: where the others reach it (UDP PORT and PORT+1, TCP PORT)
  ks node token                     on a member: one use, with an end, carries the fleet's fingerprint
  ks node join TOKEN                on the new machine
  ks node ls ; ks fleet status      who is there, who leads, is there a quorum
  ks node drain NAME                sessions move to peers; waits; goes on if you stop waiting
  ks node undrain NAME              after an upgrade: it takes sessions again
  ks node leave                     on the machine itself; ks node rm --force NAME for one that is dead
  ks user add NAME --role user      prints a token; they run: ks login HOST:PORT --fingerprint F
  ks context ls | use | rm          the fleets you know; each has several addresses, any node serves any request
A checkpoint is local, replicating or durable: as many nodes have it as the policy says (ks fleet policy). Three
machines survive one; two cannot lose either. Without a quorum sessions stand still, and go on when it is back.
",
    ),
    (
        "models",
        "\
Programs in a session call models at http://127.0.0.1:4180/PROVIDER; base URLs and a dummy key are in their environment.
  ks key add anthropic              the real key, asked for or from stdin; sealed on the node, never in a session
  ks provider add NAME ...          any server that speaks a known API
  ks ledger S [--csv] ; ks cost     calls, what they cost, what was served again; ks ledger verify S
  ks budget set 20 [--session S]    calls that would go over are refused
  ks egress allow S pypi.org        whatever else it may reach: nothing by default
After a crash, a move or a wake, calls since the checkpoint are served from the journal, not bought again; an answer on
its way goes on at the byte. After ks restore and in forks new calls are made (not with ks fork --replay parent).
",
    ),
    (
        "one-node",
        "\
A single node survives the death of a VM, of its daemon, and a restart of the machine: sessions come back from their
last checkpoint. It does not survive the loss of its disk: there is no second copy anywhere. So one copy is called
durable here (`durable 1/1` in `ks ls`) until there are more nodes (`ks help fleet`).
`ks down` ends the node and leaves its sessions running; `ks down --all` checkpoints and stops each of them first.
",
    ),
];

/// A topic's text.
pub fn topic(name: &str) -> Option<&'static str> {
    TOPICS.iter().find(|(n, _)| *n == name).map(|(_, t)| *t)
}

/// The candidate nearest to what was typed, if it is near: at most a third of the letters differ.
pub fn nearest<'a>(typed: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let near = (typed.chars().count() / 3).max(1);
    candidates.into_iter().map(|c| (distance(typed, c), c)).filter(|(d, _)| *d <= near).min().map(|(_, c)| c)
}

/// Letters to insert, delete, change or swap.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().take(64).collect(), b.chars().take(64).collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let change = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                let swap = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
                let best = change.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
                if swap { best.min(rows[i - 2][j - 2] + 1) } else { best }
            };
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_overview_is_twelve_lines_that_fit_a_terminal() {
        assert_eq!(OVERVIEW.lines().count(), 12);
        assert!(OVERVIEW.lines().chain(TOPICS.iter().flat_map(|t| t.1.lines())).all(|l| l.chars().count() <= 120));
    }

    #[test]
    fn near_misses_find_the_word_and_others_do_not() {
        let verbs = ["checkpoint", "checkpoints", "attach", "ls", "rm", "run"];
        assert_eq!(nearest("chekpoint", verbs), Some("checkpoint"));
        assert_eq!(nearest("atatch", verbs), Some("attach"));
        assert_eq!(nearest("sl", verbs), Some("ls"));
        assert_eq!(nearest("frobnicate", verbs), None);
    }
}
