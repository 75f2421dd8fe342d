//! The initramfs part: modules, the root disk, and the change to it within this same process.

use std::{
    fs::File,
    io,
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    mount::{MountFlags, mount, mount_move},
};

use super::mounts::BootError;

const MODULE_DIR: &str = "/ks/modules";
const MODULE_LIST: &str = "/ks/modules.list";
const ROOT_DEVICE: &str = "/dev/vda";
const NEW_ROOT: &str = "/newroot";
/// Long: where the kernel's code is emulated, probing a disk takes tens of seconds.
const DISK_WAIT: Duration = Duration::from_secs(120);

/// Loads modules, mounts the root disk and makes it `/`.
pub(super) fn leave() -> Result<(), BootError> {
    match std::fs::read_to_string(MODULE_LIST) {
        Ok(list) => load_modules(&list)?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(BootError::new(format!("read {MODULE_LIST}"), e)),
    }
    wait_for(Path::new(ROOT_DEVICE))?;
    std::fs::create_dir_all(NEW_ROOT).map_err(|e| BootError::new(format!("make {NEW_ROOT}"), e))?;
    mount(ROOT_DEVICE, NEW_ROOT, "ext4", MountFlags::NOATIME, c"")
        .map_err(|e| BootError::new(format!("mount {ROOT_DEVICE} (ext4)"), e))?;
    for name in ["dev", "proc", "sys"] {
        let to = Path::new(NEW_ROOT).join(name);
        let _ = std::fs::create_dir_all(&to);
        let from = Path::new("/").join(name);
        mount_move(&from, &to).map_err(|e| BootError::new(format!("move /{name} to the root disk"), e))?;
    }
    // The modules' memory is given back; the program itself stays mapped.
    let _ = std::fs::remove_dir_all("/ks");
    let fail = |e: Errno| BootError::new("change to the root disk", e);
    rustix::process::chdir(NEW_ROOT).map_err(fail)?;
    mount_move(".", "/").map_err(fail)?;
    rustix::process::chroot(".").map_err(fail)?;
    rustix::process::chdir("/").map_err(fail)
}

fn load_modules(list: &str) -> Result<(), BootError> {
    for name in names(list) {
        let path = Path::new(MODULE_DIR).join(name);
        let fail = |e: io::Error| BootError::new(format!("load the module {name}"), e);
        let file = File::open(&path).map_err(fail)?;
        match rustix::system::finit_module(&file, c"", 0) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(fail(e.into())),
        }
    }
    Ok(())
}

fn names(list: &str) -> impl Iterator<Item = &str> {
    list.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'))
}

fn wait_for(device: &Path) -> Result<(), BootError> {
    let end = Instant::now() + DISK_WAIT;
    let mut pause = Duration::from_millis(1);
    while !device.exists() {
        if Instant::now() > end {
            let why = io::Error::new(io::ErrorKind::NotFound, format!("not there after {} s", DISK_WAIT.as_secs()));
            return Err(BootError::new(format!("wait for the root disk {}", device.display()), why));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blank_lines_name_no_module() {
        assert_eq!(names("a.ko\n\n  b.ko \n# c\n").collect::<Vec<_>>(), ["a.ko", "b.ko"]);
        assert_eq!(names("").count(), 0);
    }
}
