//! Who a program runs as, from /etc/passwd and /etc/group (a static program cannot use the system's name service).

use std::path::PathBuf;

use crate::refusal::Refusal;

/// The name of the session's user.
pub const DEFAULT_USER: &str = "agent";
/// Its number, for root disks that have no such name.
pub const DEFAULT_UID: u32 = 1000;

/// One user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// Login name.
    pub name: String,
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// All groups.
    pub groups: Vec<u32>,
    /// Home directory.
    pub home: PathBuf,
    /// Login shell.
    pub shell: String,
}

impl Account {
    /// The account of the session's user, or of `wanted` (a name or a number).
    pub fn resolve(wanted: Option<&str>) -> Result<Self, Refusal> {
        let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        let group = std::fs::read_to_string("/etc/group").unwrap_or_default();
        Self::lookup(&passwd, &group, wanted)
    }

    /// The user that this process runs as.
    pub fn own() -> Self {
        let uid = rustix::process::getuid().as_raw();
        let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        Self::lookup(&passwd, "", Some(&uid.to_string())).unwrap_or_else(|_| Self {
            name: uid.to_string(),
            uid,
            gid: rustix::process::getgid().as_raw(),
            groups: vec![],
            home: "/".into(),
            shell: "/bin/sh".into(),
        })
    }

    fn lookup(passwd: &str, group: &str, wanted: Option<&str>) -> Result<Self, Refusal> {
        let entries: Vec<Self> = passwd.lines().filter_map(Self::from_line).collect();
        let by_name = |name: &str| entries.iter().find(|a| a.name == name);
        let by_uid = |uid: u32| entries.iter().find(|a| a.uid == uid);
        let found = match wanted {
            None => by_name(DEFAULT_USER).or_else(|| by_uid(DEFAULT_UID)),
            Some(w) => by_name(w).or_else(|| w.parse().ok().and_then(by_uid)),
        };
        let mut account = match (found, wanted) {
            (Some(account), _) => account.clone(),
            (None, None) => Self {
                name: DEFAULT_USER.into(),
                uid: DEFAULT_UID,
                gid: DEFAULT_UID,
                groups: vec![],
                home: "/".into(),
                shell: "/bin/sh".into(),
            },
            (None, Some(w)) => {
                let next = "name a user of the session's /etc/passwd";
                return Err(Refusal::new("bad-request", format!("run as {w}"), "there is no such user", next));
            }
        };
        account.groups = groups_of(group, &account.name, account.gid);
        Ok(account)
    }

    fn from_line(line: &str) -> Option<Self> {
        let fields: Vec<&str> = line.split(':').collect();
        let [name, _, uid, gid, _, home, shell] = fields[..] else { return None };
        let shell = if shell.is_empty() { "/bin/sh" } else { shell };
        Some(Self {
            name: name.to_owned(),
            uid: uid.parse().ok()?,
            gid: gid.parse().ok()?,
            groups: vec![],
            home: home.into(),
            shell: shell.to_owned(),
        })
    }
}

fn groups_of(group: &str, name: &str, gid: u32) -> Vec<u32> {
    let mut all = vec![gid];
    for line in group.lines() {
        let fields: Vec<&str> = line.split(':').collect();
        let [_, _, id, members] = fields[..] else { continue };
        if let Ok(id) = id.parse()
            && members.split(',').any(|m| m == name)
            && !all.contains(&id)
        {
            all.push(id);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nbad line\nagent:x:1000:1000::/home/agent:/bin/bash\n";
    const GROUP: &str = "root:x:0:\nsudo:x:27:agent,other\nagent:x:1000:\n";

    #[test]
    fn the_session_user_is_the_default() {
        let a = Account::lookup(PASSWD, GROUP, None).unwrap();
        assert_eq!((a.uid, a.gid, a.home.to_str().unwrap()), (1000, 1000, "/home/agent"));
        assert_eq!(a.groups, [1000, 27]);
        assert_eq!(Account::lookup(PASSWD, GROUP, Some("root")).unwrap().uid, 0);
        assert_eq!(Account::lookup(PASSWD, GROUP, Some("1000")).unwrap().name, "agent");
    }

    #[test]
    fn an_unknown_user_is_refused_by_name() {
        let refusal = Account::lookup(PASSWD, GROUP, Some("nobody-here")).unwrap_err();
        assert_eq!(refusal.code, "bad-request");
        assert!(refusal.what.contains("nobody-here"));
        assert_eq!(Account::lookup("", "", None).unwrap().uid, 1000);
    }
}
