// SPDX-License-Identifier: Apache-2.0
//! The value parsers of the command line.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use super::label_selector;
use crate::{
    core::{
        devices::DeviceSelection,
        model::{
            Family, Protocol,
            settings::{NodeIp, NodeIpSource, NodeIpSourceError},
        },
    },
    datapath::{CgroupSelection, ClientScope},
    nft_guard::GuardMode,
};

/// The kernel's maximum length of a device name, in bytes.
const DEVICE_NAME_BYTES: usize = 15;
/// Kubernetes' maximum length of an annotation's name, in bytes. The name of the annotation on Pods is the domain
/// itself.
const ANNOTATION_NAME_BYTES: usize = 63;
/// Kubernetes' maximum length of an object's name, in bytes.
const OBJECT_NAME_BYTES: usize = 253;
const LONGEST_DURATION: Duration = Duration::from_hours(24);
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);

/// Why a value is invalid: one sentence with an example of a valid value. clap's own parsers would print the usage
/// instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// The value is neither a keyword nor a list of addresses or address ranges.
    #[error(transparent)]
    NodeIp(#[from] NodeIpSourceError),
    /// The value is a loopback, multicast or unspecified address.
    #[error("{0} is not an address that clients can reach: give for example 192.0.2.10")]
    UnreachableNodeIp(IpAddr),
    /// The value has two addresses of one IP family.
    #[error("more than one {0} address: give at most one of each family, for example 192.0.2.10,2001:db8::10")]
    TwoNodeIps(Family),
    /// The value is not a series of numbers with units.
    #[error("{0:?} is not a duration: give a number and a unit, for example 30s, 2m or 500ms")]
    Duration(String),
    /// The duration is above [`LONGEST_DURATION`].
    #[error("{0:?} is longer than a day: give for example 60s")]
    LongDuration(String),
    /// The interval is below [`SHORTEST_INTERVAL`].
    #[error("{0:?} is shorter than a second: give for example 30s")]
    ShortInterval(String),
    /// The value is not a valid name of a Kubernetes object.
    #[error("{0:?} is not a Node's name: give the name that `kubectl get nodes` shows, for example worker-1")]
    NodeName(String),
    /// The value is not a DNS subdomain of at most 63 characters.
    #[error(
        "{0:?} is not an annotation domain: give at most 63 lower-case letters, digits, dots and dashes, for example \
         nodeportlocal.antrea.io"
    )]
    Domain(String),
    /// The value is not a label selector.
    #[error("{0:?} is not a label selector: give for example example.com/npl=yes or tier in (web,api)")]
    LabelSelector(String),
    /// The list contains an unknown protocol.
    #[error("{0:?} is not a list of protocols: give tcp, udp or sctp with commas between them, for example tcp,udp")]
    Protocols(String),
    /// The list contains a name that no device can have.
    #[error("{0:?} is not a list of devices: give auto or names with commas between them, for example eth0,eth1")]
    Devices(String),
    /// The path is relative.
    #[error("{0:?} is not an absolute path: give for example /sys/fs/bpf")]
    RelativePath(PathBuf),
    /// The value is neither a keyword nor an absolute path.
    #[error("{0:?} is not a cgroup: give auto, none or an absolute path, for example /sys/fs/cgroup")]
    Cgroup(String),
    /// The value is neither `all` nor `host`.
    #[error("{0:?} does not name local clients: give all or host")]
    ClientScope(String),
    /// The value is not `auto`, `on` or `off`.
    #[error("{0:?} is not a mode of the nftables guard: give auto, on or off")]
    Guard(String),
    /// The value is not an address with a port.
    #[error("{0:?} is not an address with a port: give for example 127.0.0.1:9911")]
    Listen(String),
    /// The value is not an address with a port, with or without brackets around the address.
    #[error("{0:?} is not an address with a port: give for example 192.0.2.10:9912 or [2001:db8::10]:9912")]
    MetricsListen(String),
}

pub(super) fn node_ip(text: &str) -> Result<NodeIpSource, ValueError> {
    let source: NodeIpSource = text.parse()?;
    if let NodeIpSource::Listed(choices) = &source {
        let address = |choice: &NodeIp| if let NodeIp::Address(ip) = choice { Some(*ip) } else { None };
        let ips: Vec<IpAddr> = choices.iter().filter_map(address).collect();
        for (index, ip) in ips.iter().enumerate() {
            if ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() {
                return Err(ValueError::UnreachableNodeIp(*ip));
            }
            let family = Family::of(*ip);
            if ips.iter().take(index).any(|earlier| Family::of(*earlier) == family) {
                return Err(ValueError::TwoNodeIps(family));
            }
        }
    }
    Ok(source)
}

pub(super) fn interval(text: &str) -> Result<Duration, ValueError> {
    Some(duration(text)?)
        .filter(|interval| *interval >= SHORTEST_INTERVAL)
        .ok_or_else(|| ValueError::ShortInterval(text.to_owned()))
}

/// Parses whole numbers, each with its unit: `500ms`, `30s`, `1m30s`, `2h`. The parser of the dependency jiff is not
/// used, because that parser also accepts signs, fractions and words such as `ago`.
///
/// # Errors
///
/// If the text is not a duration, or the duration is longer than a day.
pub fn duration(text: &str) -> Result<Duration, ValueError> {
    let unreadable = || ValueError::Duration(text.to_owned());
    let too_long = || ValueError::LongDuration(text.to_owned());
    let mut total = Duration::ZERO;
    let mut rest = text;
    while !rest.is_empty() || text.is_empty() {
        let (number, after) = split_where(rest, |c| !c.is_ascii_digit());
        let (unit, after) = split_where(after, |c| c.is_ascii_digit());
        let unit = match unit {
            "ms" => Duration::from_millis(1),
            "s" => Duration::from_secs(1),
            "m" => Duration::from_mins(1),
            "h" => Duration::from_hours(1),
            _ => return Err(unreadable()),
        };
        if number.is_empty() {
            return Err(unreadable());
        }
        let part = number.parse().ok().and_then(|number| unit.checked_mul(number)).ok_or_else(too_long)?;
        total = total.checked_add(part).ok_or_else(too_long)?;
        rest = after;
    }
    Some(total).filter(|total| *total <= LONGEST_DURATION).ok_or_else(too_long)
}

fn split_where(text: &str, at: impl Fn(char) -> bool) -> (&str, &str) {
    text.find(at).map_or((text, ""), |index| text.split_at(index))
}

pub(super) fn node_name(text: &str) -> Result<String, ValueError> {
    let text = text.to_owned();
    if is_subdomain(&text, OBJECT_NAME_BYTES) { Ok(text) } else { Err(ValueError::NodeName(text)) }
}

/// Parses a domain of annotations.
///
/// # Errors
///
/// If the text is not a DNS subdomain of at most 63 characters.
pub fn domain(text: &str) -> Result<String, ValueError> {
    let text = text.to_owned();
    if is_subdomain(&text, ANNOTATION_NAME_BYTES) { Ok(text) } else { Err(ValueError::Domain(text)) }
}

/// Whether a text is a DNS subdomain as Kubernetes defines it: labels of lower-case letters, digits and inner dashes,
/// separated by dots.
pub(super) fn is_subdomain(text: &str, longest: usize) -> bool {
    let is_label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'))
    };
    text.len() <= longest && text.split('.').all(is_label)
}

/// Parses a list of protocols.
///
/// # Errors
///
/// If a name is not a protocol that Kubernetes supports.
pub fn protocols(text: &str) -> Result<BTreeSet<Protocol>, ValueError> {
    let protocols: Result<_, _> = text.split(',').map(|name| name.trim().parse()).collect();
    protocols.map_err(|_unknown| ValueError::Protocols(text.to_owned()))
}

pub(super) fn label_selector(text: &str) -> Result<String, ValueError> {
    let is_valid = label_selector::is_valid(text);
    is_valid.then(|| text.to_owned()).ok_or_else(|| ValueError::LabelSelector(text.to_owned()))
}

pub(super) fn devices(text: &str) -> Result<DeviceSelection, ValueError> {
    if text == "auto" {
        return Ok(DeviceSelection::Auto);
    }
    let mut names: Vec<String> = Vec::new();
    for name in text.split(',').map(str::trim) {
        if !is_device_name(name) {
            return Err(ValueError::Devices(text.to_owned()));
        }
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    }
    Ok(DeviceSelection::Named(names))
}

/// Whether a device can have this name, by the rule of the kernel's function `dev_valid_name`.
fn is_device_name(name: &str) -> bool {
    let is_allowed = |c: char| !c.is_whitespace() && c != '/' && c != ':';
    (1..=DEVICE_NAME_BYTES).contains(&name.len()) && name != "." && name != ".." && name.chars().all(is_allowed)
}

pub(super) fn directory(path: PathBuf) -> Result<PathBuf, ValueError> {
    if path.is_absolute() { Ok(path) } else { Err(ValueError::RelativePath(path)) }
}

pub(super) fn guard(text: &str) -> Result<GuardMode, ValueError> {
    match text {
        "auto" => Ok(GuardMode::Auto),
        "on" => Ok(GuardMode::On),
        "off" => Ok(GuardMode::Off),
        _ => Err(ValueError::Guard(text.to_owned())),
    }
}

pub(super) fn client_scope(text: &str) -> Result<ClientScope, ValueError> {
    match text {
        "all" => Ok(ClientScope::All),
        "host" => Ok(ClientScope::Host),
        _ => Err(ValueError::ClientScope(text.to_owned())),
    }
}

pub(super) fn cgroup(text: &str) -> Result<CgroupSelection, ValueError> {
    match text {
        "auto" => Ok(CgroupSelection::Auto),
        "none" => Ok(CgroupSelection::None),
        path if path.starts_with('/') => Ok(CgroupSelection::Directory(path.into())),
        _ => Err(ValueError::Cgroup(text.to_owned())),
    }
}

pub(super) fn listen(text: &str) -> Result<SocketAddr, ValueError> {
    text.parse().map_err(|_unparsable| ValueError::Listen(text.to_owned()))
}

/// Parses the same values as [`listen`], and also an IPv4 address in brackets: the manifest has brackets around the
/// Node's address, because the address may be an IPv6 address.
pub(super) fn metrics_listen(text: &str) -> Result<SocketAddr, ValueError> {
    let unreadable = || ValueError::MetricsListen(text.to_owned());
    let bracketed = text.strip_prefix('[').and_then(|rest| rest.split_once("]:"));
    match bracketed {
        Some((address, port)) => {
            let address: IpAddr = address.parse().map_err(|_unparsable| unreadable())?;
            let port = port.parse().map_err(|_unparsable| unreadable())?;
            Ok(SocketAddr::new(address, port))
        }
        None => text.parse().map_err(|_unparsable| unreadable()),
    }
}
