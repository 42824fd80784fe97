// SPDX-License-Identifier: Apache-2.0
//! A packet socket that receives every frame of a device, with metadata that is not part of the frame's bytes.

#![expect(unsafe_code, reason = "no library in use reads a packet socket's auxiliary data")]

use std::io;
use std::os::fd::AsRawFd as _;
use std::time::Duration;

use npl_testkit::topology::Device;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::wire;

/// The protocol number `ETH_P_ALL`, which selects frames of every protocol.
const EVERYTHING: u16 = 3;
/// The flag `TP_STATUS_CSUMNOTREADY`: the frame's checksum is not computed yet.
const CHECKSUM_PENDING: u32 = 1 << 3;
/// The flag `TP_STATUS_VLAN_VALID`: the frame has a VLAN tag, which the kernel has removed from the frame's bytes.
const TAGGED: u32 = 1 << 4;
/// Size in bytes of the buffer for one frame: more than the largest MTU of the topology.
const FRAME_BYTES: usize = 2048;
/// Size in bytes of the socket's receive buffer, which must have room for all frames of one step.
const BUFFER_BYTES: libc::c_int = 4 << 20;

/// A received frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) bytes: Vec<u8>,
    /// The VLAN tag that the kernel removed from the frame.
    pub(super) tag: Option<u16>,
}

impl From<Vec<u8>> for Frame {
    fn from(bytes: Vec<u8>) -> Self {
        Self { bytes, tag: None }
    }
}

pub(super) struct Tap {
    socket: Socket,
    to: SockAddr,
}

impl Tap {
    /// Opens a socket at `device`.
    pub(super) fn open(device: &Device) -> Self {
        let protocol = Protocol::from(i32::from(EVERYTHING.to_be()));
        let socket = device.netns().run(|| Socket::new(Domain::PACKET, Type::RAW, Some(protocol))).unwrap().unwrap();
        set(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, BUFFER_BYTES);
        set(&socket, libc::SOL_PACKET, libc::PACKET_AUXDATA, 1);
        set(&socket, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1);
        let to = wire::link_address(device.ifindex().unwrap(), EVERYTHING);
        socket.bind(&to).unwrap();
        Self { socket, to }
    }

    pub(super) fn send(&self, frame: &[u8]) {
        let sent = self.socket.send_to(frame, &self.to);
        assert_eq!(sent.unwrap_or_else(|error| panic!("{error}: {frame:02x?}")), frame.len());
    }

    /// The next received frame, if there is one.
    pub(super) fn receive(&self) -> Option<Frame> {
        let mut bytes = vec![0_u8; FRAME_BYTES];
        // `u64` gives the control buffer the alignment that the kernel requires.
        let mut control = [0_u64; 8];
        let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        // SAFETY: zero is a valid value of all fields.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control));
        // SAFETY: all pointers outlive the call, and the lengths are those of their buffers.
        let length = unsafe { libc::recvmsg(self.socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        let Ok(length) = usize::try_from(length) else {
            let error = io::Error::last_os_error();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
            return None;
        };
        assert!(
            length < FRAME_BYTES && message.msg_flags & libc::MSG_TRUNC == 0,
            "a frame exceeds every MTU of the topology"
        );
        bytes.truncate(length);
        // SAFETY: the kernel filled the message, and its control buffer is still alive.
        let metadata = unsafe { auxiliary_data(&message) };
        assert_eq!(
            metadata.tp_status & CHECKSUM_PENDING,
            0,
            "a frame has no computed checksum although checksum offload is disabled on all devices: {bytes:02x?}"
        );
        Some(Frame { bytes, tag: (metadata.tp_status & TAGGED != 0).then_some(metadata.tp_vlan_tci) })
    }

    /// Waits for a frame and returns whether one has arrived within `limit`.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let mut poll = libc::pollfd { fd: self.socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let milliseconds = libc::c_int::try_from(limit.as_millis()).unwrap();
        // SAFETY: the array has one element and outlives the call.
        unsafe { libc::poll(&raw mut poll, 1, milliseconds) == 1 }
    }
}

fn set(socket: &Socket, level: libc::c_int, option: libc::c_int, value: libc::c_int) {
    let size = libc::socklen_t::try_from(size_of_val(&value)).unwrap();
    // SAFETY: the value outlives the call, and the size is its own.
    let status = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), size) };
    assert_eq!(status, 0, "{}", io::Error::last_os_error());
}

/// Returns the kernel's metadata of a frame.
///
/// # Safety
///
/// The kernel must have filled the message, and its buffers must still be alive.
unsafe fn auxiliary_data(message: &libc::msghdr) -> libc::tpacket_auxdata {
    // SAFETY: the caller guarantees that the kernel has filled the message and that its buffers are alive.
    let header = unsafe { libc::CMSG_FIRSTHDR(message) };
    assert!(!header.is_null(), "a packet socket attaches auxiliary data to each frame");
    // SAFETY: the pointer is not null, so it points into the message's buffer.
    let kind = unsafe { (*header).cmsg_type };
    assert_eq!(kind, libc::PACKET_AUXDATA);
    // SAFETY: the message has data of this kind, which is read without an assumption about its alignment.
    unsafe { libc::CMSG_DATA(header).cast::<libc::tpacket_auxdata>().read_unaligned() }
}
