//! The serial console: vm-superio's 16550 on COM1, its output in `console.log`, nothing ever typed into it.

use crate::layout;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::{Arc, Mutex};
use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;

/// The log starts again from its beginning when it would grow beyond this: a guest must not fill the host's disk.
pub const LOG_BYTES_MAX: u64 = 16 * 1024 * 1024;
const LINE_BYTES_MAX: usize = 400;

/// The log, and the line of a kernel panic if one went by.
#[derive(Debug)]
pub struct ConsoleLog {
    file: File,
    bytes: u64,
    line: Vec<u8>,
    panic: Option<String>,
}

impl ConsoleLog {
    /// Appends to `path`.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        let mut file = File::options().create(true).write(true).truncate(false).open(path)?;
        let bytes = file.seek(SeekFrom::End(0))?;
        Ok(Self { file, bytes, line: Vec::new(), panic: None })
    }
    fn put(&mut self, data: &[u8]) -> std::io::Result<()> {
        if self.bytes + data.len() as u64 > LOG_BYTES_MAX {
            self.file.set_len(0)?;
            self.file.rewind()?;
            self.bytes = 0;
        }
        self.file.write_all(data)?;
        self.bytes += data.len() as u64;
        for &b in data {
            if b == b'\n' {
                self.line.clear();
            } else if self.line.len() < LINE_BYTES_MAX {
                self.line.push(b);
                if self.panic.is_none() && self.line.ends_with(b"Kernel panic") {
                    self.panic = Some(String::new());
                }
            }
            if self.panic.is_some() && !self.line.is_empty() && self.line.windows(12).any(|w| w == b"Kernel panic") {
                self.panic = Some(String::from_utf8_lossy(&self.line).trim().to_owned());
            }
        }
        Ok(())
    }
}

/// The log shared by the port and the engine.
#[derive(Debug, Clone)]
pub struct LogHandle(Arc<Mutex<ConsoleLog>>);

impl LogHandle {
    /// Shares `log`.
    pub fn new(log: ConsoleLog) -> Self {
        Self(Arc::new(Mutex::new(log)))
    }
    /// The line that said "Kernel panic", if one did.
    pub fn panic_line(&self) -> Option<String> {
        crate::lock(&self.0).panic.clone()
    }
}

impl Write for LogHandle {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        crate::lock(&self.0).put(data)?;
        Ok(data.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The UART's interrupt line.
#[derive(Debug)]
pub struct Edge(pub EventFd);

impl Trigger for Edge {
    type E = std::io::Error;
    fn trigger(&self) -> Result<(), Self::E> {
        self.0.write(1)
    }
}

/// Registers of the UART.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedSerial {
    divisor: [u8; 2],
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
}

/// COM1.
pub struct Com1 {
    uart: Mutex<Serial<Edge, NoEvents, LogHandle>>,
    log: LogHandle,
}

impl Com1 {
    /// A port at power-on, or in the state of `saved`.
    pub fn new(edge: EventFd, log: LogHandle, saved: Option<&SavedSerial>) -> std::io::Result<Self> {
        let state = saved.map_or_else(SerialState::default, |s| SerialState {
            baud_divisor_low: s.divisor[0],
            baud_divisor_high: s.divisor[1],
            interrupt_enable: s.interrupt_enable,
            interrupt_identification: s.interrupt_identification,
            line_control: s.line_control,
            line_status: s.line_status,
            modem_control: s.modem_control,
            modem_status: s.modem_status,
            scratch: s.scratch,
            in_buffer: Vec::new(),
        });
        let uart =
            Serial::from_state(&state, Edge(edge), NoEvents, log.clone()).map_err(|e| std::io::Error::other(e.to_string()))?;
        Ok(Self { uart: Mutex::new(uart), log })
    }
    /// A byte written to port COM1 + `register`.
    pub fn write(&self, register: u8, byte: u8) {
        if let Err(e) = crate::lock(&self.uart).write(register, byte) {
            tracing::warn!("serial console: {e}");
        }
    }
    /// A byte read from port COM1 + `register`.
    pub fn read(&self, register: u8) -> u8 {
        crate::lock(&self.uart).read(register)
    }
    /// The log.
    pub fn log(&self) -> &LogHandle {
        &self.log
    }
    /// The registers.
    pub fn save(&self) -> SavedSerial {
        let s = crate::lock(&self.uart).state();
        SavedSerial {
            divisor: [s.baud_divisor_low, s.baud_divisor_high],
            interrupt_enable: s.interrupt_enable,
            interrupt_identification: s.interrupt_identification,
            line_control: s.line_control,
            line_status: s.line_status,
            modem_control: s.modem_control,
            modem_status: s.modem_status,
            scratch: s.scratch,
        }
    }
    /// True if `port` is one of its eight.
    pub fn owns(port: u16) -> bool {
        (layout::SERIAL_PORT..layout::SERIAL_PORT + 8).contains(&port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_reaches_the_log_a_panic_is_noticed_and_the_log_stays_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let log = LogHandle::new(ConsoleLog::open(&path).unwrap());
        let com1 = Com1::new(EventFd::new(0).unwrap(), log.clone(), None).unwrap();
        for b in b"hello\n[ 1.0] Kernel panic - not syncing: test\nmore\n" {
            com1.write(0, *b);
        }
        assert!(std::fs::read_to_string(&path).unwrap().starts_with("hello\n"));
        assert_eq!(log.panic_line().as_deref(), Some("[ 1.0] Kernel panic - not syncing: test"));
        let mut log = ConsoleLog::open(&path).unwrap();
        for _ in 0..LOG_BYTES_MAX / 65536 + 1 {
            log.put(&[b'x'; 65536]).unwrap();
        }
        assert!(std::fs::metadata(&path).unwrap().len() <= LOG_BYTES_MAX);
    }

    #[test]
    fn registers_survive_a_save() {
        let dir = tempfile::tempdir().unwrap();
        let log = LogHandle::new(ConsoleLog::open(&dir.path().join("c")).unwrap());
        let a = Com1::new(EventFd::new(0).unwrap(), log.clone(), None).unwrap();
        a.write(7, 0x5a);
        a.write(1, 0x02);
        let b = Com1::new(EventFd::new(0).unwrap(), log, Some(&a.save())).unwrap();
        assert_eq!((b.read(7), b.read(1)), (0x5a, 0x02));
        assert_eq!(a.save(), b.save());
    }
}
