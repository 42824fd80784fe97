// SPDX-License-Identifier: Apache-2.0
//! Configures keys and peers of wireguard devices by generic netlink (`linux/wireguard.h`), so that the tests need no
//! wireguard tool.

use std::io::{self, Read as _};
use std::net::Ipv4Addr;

use npl_testkit::netns::Netns;
use socket2::{Domain, Socket, Type};

/// The key pair of one end.
pub(super) struct Keys {
    private: [u8; 32],
    public: [u8; 32],
}

/// Keys for tests only; they are public.
pub(super) const KEYS: [Keys; 2] = [
    Keys {
        private: [1; 32],
        public: [
            0xa4, 0xe0, 0x92, 0x92, 0xb6, 0x51, 0xc2, 0x78, 0xb9, 0x77, 0x2c, 0x56, 0x9f, 0x5f, 0xa9, 0xbb, 0x13, 0xd9,
            0x06, 0xb4, 0x6a, 0xb6, 0x8c, 0x9d, 0xf9, 0xdc, 0x2b, 0x44, 0x09, 0xf8, 0xa2, 0x09,
        ],
    },
    Keys {
        private: [2; 32],
        public: [
            0xce, 0x8d, 0x3a, 0xd1, 0xcc, 0xb6, 0x33, 0xec, 0x7b, 0x70, 0xc1, 0x78, 0x14, 0xa5, 0xc7, 0x6e, 0xcd, 0x02,
            0x96, 0x85, 0x05, 0x0d, 0x34, 0x47, 0x45, 0xba, 0x05, 0x87, 0x0e, 0x58, 0x7d, 0x59,
        ],
    },
];

/// UDP port of both ends.
const PORT: u16 = 51_820;

const NETLINK_GENERIC: i32 = 16;
/// The message type of the generic netlink controller, and the command and attributes that look up the message type of
/// a family.
const GENL_ID_CTRL: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
/// Bytes before the attributes: the netlink header and the generic netlink header.
const HEADERS: usize = 16 + 4;

const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLMSG_ERROR: u16 = 2;
const NLA_F_NESTED: u16 = 1 << 15;

const WG_CMD_SET_DEVICE: u8 = 1;
const WGDEVICE_A_IFNAME: u16 = 2;
const WGDEVICE_A_PRIVATE_KEY: u16 = 3;
const WGDEVICE_A_LISTEN_PORT: u16 = 6;
const WGDEVICE_A_PEERS: u16 = 8;
const WGPEER_A_PUBLIC_KEY: u16 = 1;
const WGPEER_A_ENDPOINT: u16 = 4;
const WGPEER_A_ALLOWEDIPS: u16 = 9;
const WGALLOWEDIP_A_FAMILY: u16 = 1;
const WGALLOWEDIP_A_IPADDR: u16 = 2;
const WGALLOWEDIP_A_CIDR_MASK: u16 = 3;

/// Sets a device's key and its only peer, which is the next hop of all packets and may send from any source.
#[track_caller]
pub(super) fn connect(netns: &Netns, device: &str, own: &Keys, peer: &Keys, peer_address: Ipv4Addr) {
    let socket = netns.run(|| Socket::new(Domain::from(libc::AF_NETLINK), Type::RAW, Some(NETLINK_GENERIC.into())));
    let socket = socket.unwrap().unwrap();
    let anywhere = [(libc::AF_INET, 4), (libc::AF_INET6, 16)].map(|(family, bytes)| {
        let family = attribute(WGALLOWEDIP_A_FAMILY, &u16::try_from(family).unwrap().to_ne_bytes());
        let address = attribute(WGALLOWEDIP_A_IPADDR, &vec![0; bytes]);
        nested(0, &[family, address, attribute(WGALLOWEDIP_A_CIDR_MASK, &[0])])
    });
    let peer = nested(
        0,
        &[
            attribute(WGPEER_A_PUBLIC_KEY, &peer.public),
            attribute(WGPEER_A_ENDPOINT, &socket_address(peer_address)),
            nested(WGPEER_A_ALLOWEDIPS, &anywhere),
        ],
    );
    let settings = [
        attribute(WGDEVICE_A_IFNAME, format!("{device}\0").as_bytes()),
        attribute(WGDEVICE_A_PRIVATE_KEY, &own.private),
        attribute(WGDEVICE_A_LISTEN_PORT, &PORT.to_ne_bytes()),
        nested(WGDEVICE_A_PEERS, &[peer]),
    ];
    let kind = message_type(&socket);
    let answer = ask(&socket, kind, NLM_F_REQUEST | NLM_F_ACK, WG_CMD_SET_DEVICE, &settings);
    assert_eq!(error_in(&answer).map(|error| error.raw_os_error()), Some(Some(0)), "{answer:?}");
}

/// Returns the wireguard message type, which each kernel assigns dynamically.
fn message_type(socket: &Socket) -> u16 {
    let name = attribute(CTRL_ATTR_FAMILY_NAME, b"wireguard\0");
    let answer = ask(socket, GENL_ID_CTRL, NLM_F_REQUEST, CTRL_CMD_GETFAMILY, &[name]);
    assert!(error_in(&answer).is_none(), "{:?}", error_in(&answer));
    let mut attributes = &answer[HEADERS..];
    while attributes.len() >= 4 {
        let (length, kind) = (u16_at(attributes, 0), u16_at(attributes, 2));
        if kind == CTRL_ATTR_FAMILY_ID {
            return u16_at(attributes, 4);
        }
        attributes = &attributes[usize::from(length).next_multiple_of(4).min(attributes.len())..];
    }
    panic!("no message type in {answer:?}")
}

/// Sends a message and returns the kernel's first answer.
fn ask(mut socket: &Socket, kind: u16, flags: u16, command: u8, attributes: &[Vec<u8>]) -> Vec<u8> {
    let attributes = attributes.concat();
    let length = u32::try_from(HEADERS + attributes.len()).unwrap();
    let header = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), &flags.to_ne_bytes(), &[0; 8], &[command, 1, 0, 0]];
    socket.send(&[header.concat(), attributes].concat()).unwrap();
    let mut answer = vec![0; 4096];
    let length = socket.read(&mut answer).unwrap();
    answer.truncate(length);
    answer
}

/// Returns the error code of an answer, where zero is success; `None` if the answer is no error message.
fn error_in(answer: &[u8]) -> Option<io::Error> {
    let code = || i32::from_ne_bytes(answer[16..20].try_into().unwrap());
    (u16_at(answer, 4) == NLMSG_ERROR).then(|| io::Error::from_raw_os_error(-code()))
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + value.len()).unwrap();
    let mut bytes = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn nested(kind: u16, attributes: &[Vec<u8>]) -> Vec<u8> {
    attribute(kind | NLA_F_NESTED, &attributes.concat())
}

/// Returns the bytes of a `struct sockaddr_in`.
fn socket_address(address: Ipv4Addr) -> Vec<u8> {
    let family = u16::try_from(libc::AF_INET).unwrap().to_ne_bytes();
    [&family[..], &PORT.to_be_bytes(), &address.octets(), &[0; 8]].concat()
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([bytes[at], bytes[at + 1]])
}
