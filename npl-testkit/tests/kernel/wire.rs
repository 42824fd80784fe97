// SPDX-License-Identifier: Apache-2.0
//! Sends and receives raw frames at a device.

#![expect(unsafe_code, reason = "no library in use creates packet socket addresses")]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd as _;
use std::time::Duration;

use npl_agent::core::model::Family;
use npl_testkit::packet::Ethernet;
use npl_testkit::poll;
use npl_testkit::topology::Device;
use socket2::{Domain, Protocol, SockAddr, SockAddrStorage, Socket, Type};

/// The ethertypes of IPv4 and IPv6. A socket of [`open_for`] receives only frames with the ethertype of its family.
const ETH_P_IP: u16 = 0x0800;
const ETH_P_IPV6: u16 = 0x86dd;
/// The protocol number `ETH_P_ALL`, which selects frames of all protocols.
pub(crate) const ETH_P_ALL: u16 = 0x0003;

/// A packet socket at a device, with the link-layer addresses of the device and of its peer.
pub(crate) struct Wire {
    socket: Socket,
    to: SockAddr,
    address: [u8; 6],
    gateway: [u8; 6],
}

/// Opens a packet socket for IPv4 at `device`, whose link peer is `peer`.
pub(crate) fn open(device: &Device, peer: &Device) -> Wire {
    open_for(Family::V4, device, peer)
}

/// Does the same as [`open`], for one family.
pub(crate) fn open_for(family: Family, device: &Device, peer: &Device) -> Wire {
    open_with(if family == Family::V4 { ETH_P_IP } else { ETH_P_IPV6 }, device, peer)
}

/// Opens a socket as [`open`] does, for all packets. The socket gets a received packet before any TC program runs.
pub(crate) fn capture(device: &Device, peer: &Device) -> Wire {
    open_with(ETH_P_ALL, device, peer)
}

fn open_with(ether_type: u16, device: &Device, peer: &Device) -> Wire {
    let protocol = Protocol::from(i32::from(ether_type.to_be()));
    let socket = device.netns().run(|| Socket::new(Domain::PACKET, Type::RAW, Some(protocol))).unwrap().unwrap();
    let to = link_address(device.ifindex().unwrap(), ether_type);
    socket.bind(&to).unwrap();
    Wire { socket, to, address: device.link_address().unwrap(), gateway: peer.link_address().unwrap() }
}

impl Wire {
    /// The Ethernet header of frames that this device sends.
    pub(crate) fn ethernet(&self) -> Ethernet {
        Ethernet { destination: self.gateway, source: self.address, vlans: Vec::new() }
    }

    /// The Ethernet header of frames that arrive from the peer.
    pub(crate) fn ethernet_from_gateway(&self) -> Ethernet {
        Ethernet { destination: self.address, source: self.gateway, vlans: Vec::new() }
    }

    pub(crate) fn send(&self, frame: &[u8]) -> io::Result<usize> {
        self.socket.send_to(frame, &self.to)
    }

    /// Sends a frame of more than one page, in which all bytes after the link-layer header are in separate pages.
    pub(crate) fn send_in_parts(&self, frame: &[u8]) -> io::Result<usize> {
        const VNET_HEADER: usize = 10;
        let on: libc::c_int = 1;
        let size = u32::try_from(size_of_val(&on)).unwrap();
        let (socket, value) = (self.socket.as_raw_fd(), (&raw const on).cast());
        // SAFETY: the value outlives the call, and the size is its own.
        let status = unsafe { libc::setsockopt(socket, libc::SOL_PACKET, libc::PACKET_VNET_HDR, value, size) };
        if status != 0 {
            return Err(io::Error::last_os_error());
        }
        // The header requests neither segmentation nor checksum offload. Only the length of the linear part is set.
        let mut header = [0_u8; VNET_HEADER];
        header[2..4].copy_from_slice(&14_u16.to_ne_bytes());
        self.send(&[&header, frame].concat())
    }

    /// Returns the next frame that arrives within `limit`; a [`capture`] also returns frames that leave.
    pub(crate) fn receive(&self, limit: Duration) -> io::Result<Option<Vec<u8>>> {
        self.socket.set_read_timeout(Some(limit))?;
        let mut buffer = [MaybeUninit::new(0); 2048];
        match poll::uninterrupted(|| self.socket.recv(&mut buffer)) {
            // SAFETY: all of the buffer was initialized before the call.
            Ok(length) => Ok(Some(buffer[..length].iter().map(|byte| unsafe { byte.assume_init() }).collect())),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Returns the address of a packet socket at a device.
pub(crate) fn link_address(ifindex: u32, ether_type: u16) -> SockAddr {
    let mut storage = SockAddrStorage::zeroed();
    // SAFETY: the storage has room for any address, and the type is that of the family that is written below.
    let address = unsafe { storage.view_as::<libc::sockaddr_ll>() };
    address.sll_family = u16::try_from(libc::AF_PACKET).unwrap();
    address.sll_protocol = ether_type.to_be();
    address.sll_ifindex = ifindex.cast_signed();
    // SAFETY: all bytes are written or zero, and the length is that of the address.
    unsafe { SockAddr::new(storage, u32::try_from(size_of::<libc::sockaddr_ll>()).unwrap()) }
}
