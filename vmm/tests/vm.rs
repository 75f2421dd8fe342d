//! The VMM as its node sees it, over a real engine. Skipped, loudly, where there is no image.

mod common;

use common::{Shape, Vm, image};
use ks_proto::manifest::EngineKind;

#[test]
fn a_guest_boots_answers_is_checkpointed_killed_and_restored() {
    if image::get().is_none() {
        return;
    }
    let store = common::node::Store::new();
    let shape = Shape::new(EngineKind::Qemu);
    let t = std::time::Instant::now();
    let vm = Vm::boot(&store, &shape);
    let mut guest = vm.guest();
    println!("{} after {:?}", guest.say("ping"), t.elapsed());
    println!("{}", guest.say("clock"));
    assert_eq!(guest.say("fill 20000000 5"), "ok");
    let hash = guest.say("hash");
    assert_eq!(guest.say("write 3000000 500000 9"), "ok");
    let disk = guest.say("read 0 8000000");
    let (id, stats) = vm.checkpoint(None);
    println!("{stats:?}");
    assert_eq!(guest.say("hash"), hash, "the guest goes on on the same connection");
    println!("{:?} {:?}", vm.stats(), vm.node.events());
    vm.kill();

    let t = std::time::Instant::now();
    let vm = Vm::restore(&store, &shape, id);
    println!("restored after {:?}", t.elapsed());
    let mut guest = vm.guest();
    println!("{} after {:?}", guest.say("ping"), t.elapsed());
    println!("{}", guest.say("clock"));
    assert_eq!(guest.say("hash"), hash);
    assert_eq!(guest.say("read 0 8000000"), disk);
    println!("{:?} {:?}", vm.stats(), vm.node.events());
}
