//! The swarm's task: carries out what the link machine decides, and feeds it what happened.

use std::{
    collections::BTreeMap,
    io,
    net::UdpSocket,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures::{AsyncReadExt as _, AsyncWriteExt as _, StreamExt as _};
use libp2p::{
    Multiaddr, PeerId, Stream, StreamProtocol, Swarm, SwarmBuilder,
    core::transport::ListenerId,
    core::upgrade::Version,
    swarm::{
        ConnectionId, DialError, ListenError, NetworkBehaviour, SwarmEvent,
        dial_opts::{DialOpts, PeerCondition},
    },
};
use libp2p_allow_block_list as allow_list;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::{
    control::{self, ControlConfig, StartError},
    wire::{Inbound, Open, Router, Wire},
};
use crate::{
    address::socket_addr,
    links::{Effect, Input, Links, PeerState},
};

/// Streams that a peer may have open on one connection.
const STREAMS_MAX: u32 = 512;
/// Bytes that a peer may have under way on one stream.
pub(crate) const STREAM_WINDOW: u32 = 512 << 10;
/// Invariant: all streams together fit in the connection's window, so a stream that nobody reads never stops another one.
const CONNECTION_WINDOW: u32 = STREAMS_MAX * STREAM_WINDOW;
/// How long peers are given to hear that this node closes.
const GOODBYE: Duration = Duration::from_millis(300);
/// Pause before another try to listen again.
const RELISTEN_PAUSE: Duration = Duration::from_millis(250);
/// Refused connections are logged no more often than this.
const REFUSALS_EVERY: Duration = Duration::from_secs(10);
/// Name of the echo protocol: 8 bytes there, the same 8 bytes back.
pub(crate) const ECHO: StreamProtocol = StreamProtocol::new("/ks/echo/1");
/// How long an echo may take.
const ECHO_DEADLINE: Duration = Duration::from_secs(2);
/// Echoes that are answered at a time.
const ECHOES_MAX: usize = 64;

/// What others ask of the swarm's task.
pub(crate) enum Command {
    Open {
        peer: PeerId,
        open: Open,
    },
    Echoed {
        peer: PeerId,
        rtt_us: u64,
    },
    #[cfg(test)]
    DropListeners,
}

/// What the swarm's task shows.
pub(crate) struct Task {
    pub(crate) states: watch::Receiver<BTreeMap<PeerId, PeerState>>,
    pub(crate) listening: watch::Receiver<Vec<Multiaddr>>,
    pub(crate) done: watch::Receiver<bool>,
    pub(crate) echo_every: Duration,
}

// The allow-list comes first: a stranger's connection is denied before the streams' handler for it exists.
#[derive(NetworkBehaviour)]
struct Behaviour {
    allow: allow_list::Behaviour<allow_list::AllowedPeers>,
    wire: Wire,
}

struct Running {
    swarm: Swarm<Behaviour>,
    links: Links,
    started: Instant,
    /// The listeners and the addresses that they were asked to hold.
    listeners: Vec<(ListenerId, Multiaddr)>,
    relisten: Option<(Instant, Vec<Multiaddr>)>,
    refusals: u64,
    refusals_told: Option<Instant>,
    states: watch::Sender<BTreeMap<PeerId, PeerState>>,
    listening: watch::Sender<Vec<Multiaddr>>,
}

/// Listens, then runs the task until `stop`.
pub(crate) async fn start(
    config: ControlConfig,
    router: Arc<Router>,
    commands: mpsc::Receiver<Command>,
    members: watch::Receiver<BTreeMap<PeerId, Vec<Multiaddr>>>,
    stop: CancellationToken,
) -> Result<Task, StartError> {
    if std::env::var_os("SSLKEYLOGFILE").is_some() {
        return Err(StartError::KeyLog);
    }
    if config.listen.is_empty() {
        return Err(StartError::Address("nothing".into()));
    }
    if let Some(bad) = config.listen.iter().find(|address| socket_addr(address).is_none()) {
        return Err(StartError::Address(bad.to_string()));
    }
    let me = config.key.public().to_peer_id();
    let (states, states_seen) = watch::channel(BTreeMap::new());
    let (listening, listening_seen) = watch::channel(Vec::new());
    let (done, done_seen) = watch::channel(false);
    let mut running = Running {
        swarm: build(&config, router)?,
        links: Links::new(me, config.links, seed(me)),
        started: Instant::now(),
        listeners: Vec::new(),
        relisten: None,
        refusals: 0,
        refusals_told: None,
        states,
        listening,
    };
    let patience = Instant::now() + config.bind_patience;
    for address in &config.listen {
        running.listen(address, patience).await?;
    }
    running.wait_for_listeners(&config.listen[0], patience).await?;
    let echo_every = config.echo_every;
    tokio::spawn(async move {
        running.run(commands, members, stop).await;
        drop(running);
        let _ = done.send(true);
    });
    Ok(Task { states: states_seen, listening: listening_seen, done: done_seen, echo_every })
}

fn build(config: &ControlConfig, router: Arc<Router>) -> Result<Swarm<Behaviour>, StartError> {
    let idle_ms = u32::try_from(config.idle_timeout.as_millis()).unwrap_or(u32::MAX);
    let keep_alive = config.idle_timeout / 4;
    let handshake = config.handshake_timeout;
    let swarm = SwarmBuilder::with_existing_identity(config.key.clone())
        .with_tokio()
        .with_quic_config(|mut quic| {
            quic.max_idle_timeout = idle_ms;
            quic.keep_alive_interval = keep_alive;
            quic.handshake_timeout = handshake;
            quic.max_concurrent_stream_limit = STREAMS_MAX;
            quic.max_stream_data = STREAM_WINDOW;
            quic.max_connection_data = CONNECTION_WINDOW;
            quic
        })
        .with_behaviour(|_| Behaviour { allow: allow_list::Behaviour::default(), wire: Wire::new(router) })
        .map_err(|error| StartError::Transport(error.to_string().into()))?
        .with_swarm_config(|swarm| {
            // Lazy: a stream's first bytes go with its protocol's name, so a call takes one round trip and not two.
            swarm
                .with_substream_upgrade_protocol_override(Version::V1Lazy)
                .with_max_negotiating_inbound_streams(STREAMS_MAX as usize)
        })
        .build();
    Ok(swarm)
}

/// Differs between nodes and starts; feeds only the jitter of dials.
fn seed(me: PeerId) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let mut hasher = blake3::Hasher::new();
    hasher.update(&me.to_bytes()).update(&now.to_le_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    u64::from_le_bytes(first)
}

impl Running {
    async fn listen(&mut self, address: &Multiaddr, patience: Instant) -> Result<(), StartError> {
        loop {
            // Tried with a plain socket first: the library's errors hide the system's reason.
            let tried = match socket_addr(address).map(UdpSocket::bind).transpose() {
                Ok(socket) => {
                    drop(socket);
                    self.swarm.listen_on(address.clone()).map_err(io::Error::other)
                }
                Err(error) => Err(error),
            };
            match tried {
                Ok(id) => {
                    self.listeners.push((id, address.clone()));
                    return Ok(());
                }
                Err(source) if source.kind() == io::ErrorKind::AddrInUse && Instant::now() < patience => {
                    sleep(RELISTEN_PAUSE).await
                }
                Err(source) => return Err(StartError::Listen { address: address.clone(), source }),
            }
        }
    }

    /// Until each listener has told an address.
    async fn wait_for_listeners(&mut self, address: &Multiaddr, patience: Instant) -> Result<(), StartError> {
        let wanted = self.listeners.len();
        let all = async {
            while self.listening.borrow().len() < wanted {
                let event = self.swarm.select_next_some().await;
                self.event(event);
            }
        };
        let limit = patience.max(Instant::now() + Duration::from_secs(1));
        let timeout = |_| StartError::Listen { address: address.clone(), source: io::ErrorKind::TimedOut.into() };
        tokio::time::timeout_at(limit, all).await.map_err(timeout)
    }

    async fn run(
        &mut self,
        mut commands: mpsc::Receiver<Command>,
        mut members: watch::Receiver<BTreeMap<PeerId, Vec<Multiaddr>>>,
        stop: CancellationToken,
    ) {
        loop {
            let wake = self.links.wake_ms().map(|ms| self.started + Duration::from_millis(ms));
            let wake = match (&self.relisten, wake) {
                (Some((at, _)), Some(wake)) => Some(wake.min(*at)),
                (Some((at, _)), None) => Some(*at),
                (None, wake) => wake,
            };
            let far = Instant::now() + Duration::from_secs(3600);
            tokio::select! {
                // In this order: who may talk is settled before anything of theirs is handled, and the endless source comes last.
                biased;
                () = stop.cancelled() => break,
                Ok(()) = members.changed() => {
                    let members = members.borrow_and_update().clone();
                    self.step(Input::Members(members));
                }
                () = sleep_until(wake.unwrap_or(far)) => {
                    self.listen_again();
                    self.step(Input::Tick);
                }
                Some(command) = commands.recv() => self.command(command),
                event = self.swarm.select_next_some() => self.event(event),
            }
        }
        self.goodbye().await;
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Open { peer, open } => self.swarm.behaviour_mut().wire.open(peer, open),
            Command::Echoed { peer, rtt_us } => self.step(Input::Echoed { peer, rtt_us }),
            #[cfg(test)]
            Command::DropListeners => {
                let ids: Vec<_> = self.listeners.iter().map(|(id, _)| *id).collect();
                for id in ids {
                    self.swarm.remove_listener(id);
                }
            }
        }
    }

    fn step(&mut self, input: Input) {
        let now_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let mut queue = self.links.step(now_ms, input);
        while !queue.is_empty() {
            for effect in std::mem::take(&mut queue) {
                if let Some(failed) = self.carry_out(effect) {
                    queue.extend(self.links.step(now_ms, failed));
                }
            }
        }
        let states = self.links.states();
        self.states.send_if_modified(|old| {
            let new = *old != states;
            if new {
                *old = states;
            }
            new
        });
    }

    fn carry_out(&mut self, effect: Effect) -> Option<Input> {
        match effect {
            Effect::Allow(peer) => {
                self.swarm.behaviour_mut().allow.allow_peer(peer);
            }
            Effect::Refuse(peer) => {
                self.swarm.behaviour_mut().allow.disallow_peer(peer);
            }
            Effect::Dial { peer, addresses } => {
                let options = DialOpts::peer_id(peer).condition(PeerCondition::Always).addresses(addresses).build();
                if let Err(error) = self.swarm.dial(options) {
                    return Some(Input::DialFailed { peer, error: dial_reason(&error) });
                }
            }
            Effect::Close(id) => {
                self.swarm.close_connection(id);
            }
        }
        None
    }

    fn event(&mut self, event: SwarmEvent<BehaviourEvent>) {
        match event {
            SwarmEvent::ConnectionEstablished { peer_id, connection_id, endpoint, .. } => {
                tracing::debug!(peer = %peer_id, %connection_id, dialled = endpoint.is_dialer(), "connected");
                self.step(Input::Opened { peer: peer_id, id: connection_id, dialled: endpoint.is_dialer() });
            }
            SwarmEvent::ConnectionClosed { peer_id, connection_id, cause, .. } => {
                self.closed(peer_id, connection_id, cause.map(|cause| cause.to_string()));
            }
            SwarmEvent::OutgoingConnectionError { peer_id: Some(peer), error, .. } => {
                self.step(Input::DialFailed { peer, error: dial_reason(&error) });
            }
            SwarmEvent::IncomingConnectionError { send_back_addr, error, .. } => {
                self.refused(&send_back_addr, &error);
            }
            SwarmEvent::NewListenAddr { address, .. } => {
                tracing::info!(%address, "control plane listens");
                self.listening.send_modify(|all| all.push(address));
            }
            SwarmEvent::ExpiredListenAddr { address, .. } => {
                self.listening.send_modify(|all| all.retain(|other| *other != address))
            }
            SwarmEvent::ListenerError { error, .. } => tracing::warn!(%error, "the control plane's listener stumbled"),
            SwarmEvent::ListenerClosed { listener_id, addresses, reason } => {
                self.listener_closed(listener_id, &addresses, reason)
            }
            _ => {}
        }
    }

    /// Strangers decide how often this happens, so it must not fill the log.
    fn refused(&mut self, from: &Multiaddr, error: &ListenError) {
        self.refusals += 1;
        if self.refusals_told.is_none_or(|at| at.elapsed() >= REFUSALS_EVERY) {
            tracing::warn!(%from, %error, since_last = self.refusals, "connection refused");
            self.refusals_told = Some(Instant::now());
            self.refusals = 0;
        }
    }

    fn closed(&mut self, peer: PeerId, id: ConnectionId, error: Option<String>) {
        tracing::debug!(%peer, %id, error, "disconnected");
        self.step(Input::Closed { peer, id, error });
    }

    fn listener_closed(&mut self, id: ListenerId, addresses: &[Multiaddr], reason: io::Result<()>) {
        let Some(at) = self.listeners.iter().position(|(other, _)| *other == id) else { return };
        let (_, wanted) = self.listeners.remove(at);
        // A free port was picked once and peers know it: take the same one again.
        let again = addresses.first().cloned().unwrap_or(wanted);
        tracing::warn!(address = %again, error = ?reason.err(), "the control plane's listener is gone; listening again");
        self.listening.send_modify(|all| all.retain(|other| !addresses.contains(other)));
        let (_, waiting) = self.relisten.get_or_insert_with(|| (Instant::now(), Vec::new()));
        waiting.push(again);
    }

    fn listen_again(&mut self) {
        let Some((at, addresses)) = self.relisten.take() else { return };
        if Instant::now() < at {
            self.relisten = Some((at, addresses));
            return;
        }
        let mut failed = Vec::new();
        for address in addresses {
            match self.swarm.listen_on(address.clone()) {
                Ok(id) => {
                    self.listeners.push((id, address));
                }
                Err(error) => {
                    tracing::warn!(%address, %error, "cannot listen again yet");
                    failed.push(address);
                }
            }
        }
        if !failed.is_empty() {
            self.relisten = Some((Instant::now() + RELISTEN_PAUSE, failed));
        }
    }

    /// Lets the peers know, so that they need not wait for their timeouts.
    async fn goodbye(&mut self) {
        let peers: Vec<_> = self.swarm.connected_peers().copied().collect();
        for peer in peers {
            let _ = self.swarm.disconnect_peer_id(peer);
        }
        let all = async {
            while self.swarm.connected_peers().next().is_some() {
                let _ = self.swarm.select_next_some().await;
            }
        };
        let _ = tokio::time::timeout(GOODBYE, all).await;
    }
}

/// In words; the library's own text repeats itself.
fn dial_reason(error: &DialError) -> String {
    match error {
        DialError::Transport(all) => match all.first() {
            Some((address, error)) => format!("{address}: {error}"),
            None => "no address".into(),
        },
        DialError::WrongPeerId { obtained, .. } => format!("another node answers at this address ({obtained})"),
        other => other.to_string(),
    }
}

/// Sends the peers' echoes back.
pub(crate) async fn answer_echoes(mut inbound: mpsc::Receiver<Inbound>, stop: CancellationToken) {
    let running = Arc::new(tokio::sync::Semaphore::new(ECHOES_MAX));
    while let Some(Some((_, mut stream))) = stop.run_until_cancelled(inbound.recv()).await {
        let Ok(permit) = running.clone().try_acquire_owned() else { continue };
        tokio::spawn(async move {
            let _permit = permit;
            let echo = async {
                let mut bytes = [0; 8];
                stream.read_exact(&mut bytes).await?;
                stream.write_all(&bytes).await?;
                stream.close().await
            };
            let _ = tokio::time::timeout(ECHO_DEADLINE, echo).await;
        });
    }
}

/// Takes the round-trip time of every connected peer, again and again.
pub(crate) async fn measure(
    commands: mpsc::WeakSender<Command>,
    states: watch::Receiver<BTreeMap<PeerId, PeerState>>,
    every: Duration,
    stop: CancellationToken,
) {
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let connected: Vec<PeerId> = states.borrow().iter().filter(|(_, state)| state.connected).map(|(peer, _)| *peer).collect();
        let echoes = connected.into_iter().map(|peer| {
            let commands = commands.clone();
            async move {
                let Some(commands) = commands.upgrade() else { return };
                let start = Instant::now();
                let echo = async { echo(control::open(&commands, peer, ECHO).await.ok()?).await };
                if let Ok(Some(())) = tokio::time::timeout(ECHO_DEADLINE, echo).await {
                    let rtt_us = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
                    let _ = commands.send(Command::Echoed { peer, rtt_us }).await;
                }
            }
        });
        futures::future::join_all(echoes).await;
    }
}

async fn echo(mut stream: Stream) -> Option<()> {
    let sent = [7; 8];
    stream.write_all(&sent).await.ok()?;
    stream.flush().await.ok()?;
    let mut back = [0; 8];
    stream.read_exact(&mut back).await.ok()?;
    let _ = stream.close().await;
    (back == sent).then_some(())
}
