//! Control addresses: a socket address as the only kind of multiaddr that the control plane speaks (IP, UDP, QUIC v1).
//!
//! Refuses names (nothing is ever looked up), relays and other transports.

use std::net::{IpAddr, SocketAddr};

use libp2p::{Multiaddr, multiaddr::Protocol};

/// The multiaddr of a control plane that listens on this UDP address: `/ip4/…/udp/…/quic-v1`.
#[must_use]
pub fn control_addr(address: SocketAddr) -> Multiaddr {
    Multiaddr::from(address.ip()).with(Protocol::Udp(address.port())).with(Protocol::QuicV1)
}

/// The UDP address of a control multiaddr; `None` for anything but IP, UDP and QUIC v1.
#[must_use]
pub fn socket_addr(address: &Multiaddr) -> Option<SocketAddr> {
    let mut parts = address.iter();
    let ip: IpAddr = match parts.next()? {
        Protocol::Ip4(ip) => ip.into(),
        Protocol::Ip6(ip) => ip.into(),
        _ => return None,
    };
    let Protocol::Udp(port) = parts.next()? else { return None };
    let quic = matches!(parts.next()?, Protocol::QuicV1);
    (quic && parts.next().is_none()).then_some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_quic_on_an_ip_address_is_an_address() {
        for text in ["127.0.0.1:7450", "[::1]:1", "10.0.0.1:65535"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(socket_addr(&control_addr(address)), Some(address));
        }
        assert_eq!(control_addr("127.0.0.1:7450".parse().unwrap()).to_string(), "/ip4/127.0.0.1/udp/7450/quic-v1");
        for text in [
            "/ip4/127.0.0.1/tcp/1",
            "/ip4/127.0.0.1/udp/1",
            "/dns/example.org/udp/1/quic-v1",
            "/ip4/127.0.0.1/udp/1/quic-v1/p2p-circuit",
        ] {
            assert_eq!(socket_addr(&text.parse().unwrap()), None, "{text}");
        }
    }
}
