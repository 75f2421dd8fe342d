//! The lab itself: a fault that does nothing would make every test above pass for the wrong reason.

use crate::lab::{Net, ok};
use anyhow::{Context, Result, ensure};
use std::process::{Child, Command, Stdio};

const LISTEN: &str = "import socket,sys\ns=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\ns.bind(('0.0.0.0',9))\nprint('ready',flush=True)\ns.settimeout(float(sys.argv[1]))\ntry: print(s.recv(9).decode())\nexcept TimeoutError: print('nothing')";
const SEND: &str = "import socket,sys,time\ns=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\nfor _ in range(20):\n try: s.sendto(b'hello',(sys.argv[1],9))\n except OSError: pass\n time.sleep(0.05)";

fn python(net: &Net, i: usize, program: &str, argument: &str) -> Result<Child> {
    let mut c = Command::new("nsenter");
    c.arg(format!("--net=/run/netns/{}", net.namespace(i))).args(["python3", "-c", program, argument]);
    c.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().context("python3")
}

/// Do datagrams get from one node to another?
fn reaches(net: &Net, from: usize, to: usize) -> Result<bool> {
    use std::io::{BufRead, BufReader};
    let mut listener = python(net, to, LISTEN, "3")?;
    let mut lines = BufReader::new(listener.stdout.take().context("a pipe")?).lines();
    ensure!(lines.next().transpose()?.as_deref() == Some("ready"));
    let mut sender = python(net, from, SEND, &Net::address(to))?;
    let got = lines.next().transpose()?;
    sender.wait()?;
    listener.wait()?;
    Ok(got.as_deref() == Some("hello"))
}

#[test]
fn the_network_loses_what_it_is_told_to_lose() {
    if let Some(why) = Net::missing() {
        println!("skipped: no root/netns: {why}");
        return;
    }
    let faults = || -> Result<()> {
        let net = Net::new(3)?;
        ensure!(reaches(&net, 0, 1)? && reaches(&net, 1, 0)?, "a healthy network");
        net.lose(0, Some(1))?;
        ensure!(!reaches(&net, 0, 1)?, "what node 1 sends to node 2 is lost");
        ensure!(reaches(&net, 1, 0)? && reaches(&net, 0, 2)?, "and nothing else");
        net.heal()?;
        ensure!(reaches(&net, 0, 1)?, "healed");
        net.cut(2)?;
        ensure!(!reaches(&net, 0, 2)? && !reaches(&net, 2, 0)? && reaches(&net, 0, 1)?, "a cable is pulled");
        net.heal()?;
        ensure!(reaches(&net, 2, 0)?, "and plugged in again");
        Ok(())
    };
    faults().unwrap_or_else(|e| panic!("{e:#}"));
}

#[test]
fn killing_a_host_leaves_none_of_its_processes_and_all_of_the_others() {
    use crate::lab::Part;
    let Some(lab) = crate::harness::long_fleet() else { return };
    let killed = || -> Result<()> {
        let before: Vec<usize> = lab.others(&[]).iter().map(|i| lab.process_ids(*i, Part::All).len()).collect();
        ensure!(before.iter().all(|n| *n >= 2), "ksd and its supervisor on each: {before:?}");
        let n = lab.kill(0, Part::All);
        ensure!(n >= before[0] && lab.process_ids(0, Part::All).is_empty(), "{n} of {}", before[0]);
        for i in lab.others(&[0]) {
            ensure!(lab.process_ids(i, Part::All).len() >= 2, "a process of another host is gone");
        }
        ok(lab.anywhere(), &["ls"]).map(|_| ())
    };
    killed().unwrap_or_else(|e| panic!("{e:#}"));
}
