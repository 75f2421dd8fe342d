//! What this host can run VMs with, and why `auto` means what it means here.

use ks_proto::api::ApiError;
use ks_proto::manifest::EngineKind;
use std::path::{Path, PathBuf};

/// What was found.
#[derive(Debug, Clone)]
pub struct HostFacts {
    /// /dev/kvm can be opened, or why not.
    pub kvm: Result<(), String>,
    /// `/sys/module/kvm_pvm` exists: KVM in software.
    pub software_kvm: bool,
    /// The processor has VMX or SVM.
    pub virtualization: bool,
    /// The QEMU program and its version line, or why not.
    pub qemu: Result<(PathBuf, String), String>,
    /// /dev/userfaultfd can be opened, or why not.
    pub userfaultfd: Result<(), String>,
}

/// An engine with its profile, version and reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineChoice {
    /// Engine.
    pub engine: EngineKind,
    /// `hardware`, `soft` or `tcg`.
    pub profile: String,
    /// Version line, part of a golden checkpoint's key.
    pub version: String,
    /// Why.
    pub why: String,
}

impl HostFacts {
    /// Looks at this host.
    pub fn probe() -> Self {
        let openable = |p: &str| {
            let open = std::fs::OpenOptions::new().read(true).write(true).open(p);
            open.map(drop).map_err(|e| format!("{p}: {e}"))
        };
        let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let flags = cpu.lines().find(|l| l.starts_with("flags")).unwrap_or_default();
        Self {
            kvm: openable("/dev/kvm"),
            software_kvm: Path::new("/sys/module/kvm_pvm").exists(),
            virtualization: flags.split_whitespace().any(|f| f == "vmx" || f == "svm"),
            qemu: find_qemu(),
            userfaultfd: openable("/dev/userfaultfd"),
        }
    }

    /// The engine for `wanted` (`auto`, `kvm` or `qemu`).
    ///
    /// # Errors
    /// If this host cannot run it, with what is missing.
    pub fn choose(&self, wanted: &str) -> Result<EngineChoice, ApiError> {
        let missing = |what: &str, why: String, next: &str| ApiError::new("engine-missing", what, why, next);
        match wanted {
            "kvm" => {
                self.kvm.clone().map_err(|why| {
                    missing("the kvm engine", why, "enable virtualization, join the group kvm, or use --engine qemu")
                })?;
                Ok(self.kvm_choice("it was asked for"))
            }
            "qemu" => Ok(self.qemu_choice("it was asked for")?),
            "auto" | "" => {
                if self.kvm.is_ok() && self.virtualization && !self.software_kvm {
                    return Ok(self.kvm_choice("this host has hardware virtualization"));
                }
                let why = match &self.kvm {
                    Err(why) => format!("no usable KVM ({why})"),
                    Ok(()) if self.software_kvm => {
                        "KVM is done in software here, where an ordinary guest is quicker under QEMU".into()
                    }
                    Ok(()) => "the processor shows no VMX or SVM".into(),
                };
                match self.qemu_choice(&why) {
                    Ok(choice) => Ok(choice),
                    Err(_) if self.kvm.is_ok() => Ok(self.kvm_choice(&format!("{why}, and there is no QEMU"))),
                    Err(e) => Err(e),
                }
            }
            other => {
                let why = format!("{other:?} is not auto, kvm or qemu");
                Err(ApiError::new("usage", "the engine", why, "use --engine auto, kvm or qemu"))
            }
        }
    }

    fn kvm_choice(&self, why: &str) -> EngineChoice {
        let profile = if self.software_kvm || !self.virtualization { "soft" } else { "hardware" };
        let version = format!("ks-vmm {}", env!("CARGO_PKG_VERSION"));
        EngineChoice { engine: EngineKind::Kvm, profile: profile.into(), version, why: why.into() }
    }

    fn qemu_choice(&self, why: &str) -> Result<EngineChoice, ApiError> {
        let (_, version) = self.qemu.clone().map_err(|why| {
            let next = "install it: apt-get install qemu-system-x86, or set KS_QEMU";
            ApiError::new("engine-missing", "the qemu engine", why, next)
        })?;
        Ok(EngineChoice { engine: EngineKind::Qemu, profile: "tcg".into(), version, why: why.into() })
    }
}

fn find_qemu() -> Result<(PathBuf, String), String> {
    let program = match std::env::var_os("KS_QEMU") {
        Some(p) => PathBuf::from(p),
        None => {
            let path = std::env::var_os("PATH").unwrap_or_default();
            let found = std::env::split_paths(&path).map(|d| d.join("qemu-system-x86_64")).find(|p| p.is_file());
            found.ok_or("qemu-system-x86_64 is not in PATH")?
        }
    };
    let out = std::process::Command::new(&program).arg("--version").output();
    let out = out.map_err(|e| format!("{}: {e}", program.display()))?;
    let line = String::from_utf8_lossy(&out.stdout).lines().next().unwrap_or_default().to_owned();
    if !out.status.success() || line.is_empty() {
        return Err(format!("{} --version failed ({})", program.display(), out.status));
    }
    Ok((program, line))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(kvm: bool, software_kvm: bool, virtualization: bool, qemu: bool) -> HostFacts {
        let no = || Err("absent".to_owned());
        HostFacts {
            kvm: if kvm { Ok(()) } else { no() },
            software_kvm,
            virtualization,
            qemu: if qemu { Ok(("q".into(), "QEMU 7.2".into())) } else { Err("absent".into()) },
            userfaultfd: Ok(()),
        }
    }

    #[test]
    fn auto_takes_kvm_on_hardware_and_qemu_elsewhere() {
        let pick = |f: HostFacts, w: &str| f.choose(w).map(|c| format!("{} {}", c.engine, c.profile)).map_err(|e| e.code);
        assert_eq!(pick(facts(true, false, true, true), "auto").as_deref(), Ok("kvm hardware"));
        assert_eq!(pick(facts(true, true, false, true), "auto").as_deref(), Ok("qemu tcg"));
        assert_eq!(pick(facts(true, true, false, false), "auto").as_deref(), Ok("kvm soft"));
        assert_eq!(pick(facts(false, false, true, true), "auto").as_deref(), Ok("qemu tcg"));
        assert_eq!(pick(facts(false, false, true, false), "auto"), Err("engine-missing".into()));
        assert_eq!(pick(facts(true, true, false, true), "kvm").as_deref(), Ok("kvm soft"));
        assert_eq!(pick(facts(false, true, false, true), "kvm"), Err("engine-missing".into()));
        assert_eq!(pick(facts(true, true, false, true), "xen"), Err("usage".into()));
    }
}
