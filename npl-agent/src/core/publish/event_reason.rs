// SPDX-License-Identifier: Apache-2.0
//! The reasons of Kubernetes Events, and the text about each reason for operators in `docs/reference/events.md`.

macro_rules! event_reasons {
    ($( $name:ident on $object:ident, $cause:literal, $action:literal; )+) => {
        /// The reason of an Event, and the label of the metric `npl_problems`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum EventReason {
            $( #[doc = $cause] $name, )+
        }

        impl EventReason {
            /// Every reason.
            pub const ALL: &[Self] = &[ $( Self::$name, )+ ];

            /// The reason as the Event and the metric show it.
            pub const fn name(self) -> &'static str {
                match self { $( Self::$name => stringify!($name), )+ }
            }

            /// The kind of the object that the Event is about.
            pub const fn object(self) -> &'static str {
                match self { $( Self::$name => stringify!($object), )+ }
            }

            /// The cause and its effect, in one to three sentences.
            pub const fn cause(self) -> &'static str {
                match self { $( Self::$name => $cause, )+ }
            }

            /// Whether every requested port is served in spite of the problem.
            pub const fn leaves_all_ports_served(self) -> bool {
                matches!(self, Self::ProtocolsNotMerged | Self::SourceRangesNotEnforced | Self::NodePortRequestRefused)
            }

            /// The action that an operator can take.
            pub const fn action(self) -> &'static str {
                match self { $( Self::$name => $action, )+ }
            }
        }
    };
}

event_reasons! {
    PortRangeExhausted on Pod,
        "No node port of the IP family and protocol is free. The Pod port gets no node port; the Pod's other ports are served.",
        "Widen `NPL_PORT_RANGE`, shorten `NPL_QUARANTINE`, or find the programs that use ports of the range (`ss \
         -tulnp`). The Pod gets the first node port that becomes free.";
    UnresolvedTargetPort on Pod,
        "No container port of the Pod has the name and protocol of the Service's `targetPort`. This port of the Service gets no \
         node port.",
        "Name the container port, or change the `targetPort`.";
    NoNodeAddress on Pod,
        "The Node has no address of an IP family of the Service. The Pod gets no node port of that family.",
        "Add an address of the family to the Node, or name an address of the Node with `NPL_NODE_IP`.";
    AddressConflict on Pod,
        "Another Pod of the Node has the same address and gets the traffic. Of Pods with the same address, NPL serves \
         the Pod that got the address last, unless that Pod is being deleted.",
        "Delete one of the two Pods, and find out why the CNI assigned the address twice.";
    PodOnNodeNetwork on Pod,
        "The route to the Pod leaves through a device that clients use: the Pod is attached to the Node's own network \
         by macvlan, ipvlan or a bridge. The Pod would answer clients directly, with its own address instead of the \
         Node's address. The Pod gets no node port.",
        "Let the load balancer use the Pod's address, or attach the Pod to a network behind the Node.";
    HostPortConflict on Pod,
        "The `hostPort` of the Pod is the node port of another Pod, which gets the traffic.",
        "Choose a `hostPort` outside `NPL_PORT_RANGE`.";
    NodePortConflict on Pod,
        "The node port of the Pod is also a `nodePort` or `healthCheckNodePort` of a Service, and no other node port is free. \
         Clients of that Service reach the Pod.",
        "Widen `NPL_PORT_RANGE`, or give the Service a `nodePort` or `healthCheckNodePort` outside of that range. \
         The Pod moves to the first node port that becomes free.";
    NodePortShadowed on Service,
        "A `nodePort` or `healthCheckNodePort` of the Service is the node port of a Pod's mapping, and no other node port is \
         free. On the Pod's Node, clients of the Service reach that Pod.",
        "Choose a port outside `NPL_PORT_RANGE`.";
    NodePortRequestRefused on Pod,
        "The Pod does not get a node port that its annotation `requested-node-ports` requests: requests are not \
         enabled, an entry of the annotation is faulty, or the node port was not free. The Pod port gets an ordinary \
         node port.",
        "The Event names the cause and the remedy. A Pod port does not move to the requested node port later: delete \
         the Pod once the node port is free, so that its successor gets the node port.";
    AnnotationContested on Pod,
        "Another writer, which the Event names by its field manager, repeatedly replaces the annotation. The agent \
         writes its own value with a delay that grows to a minute; meanwhile load balancers read the other value.",
        "Let only one controller publish node ports: disable NodePortLocal in Antrea, or remove the other release of NPL.";
    UnsupportedProtocol on Service,
        "The protocol of a port is not among the agent's protocols. The port gets no node port; the Service's other ports are \
         served.",
        "Add the protocol to `NPL_PROTOCOLS`; add `sctp` only if the load balancer reads the protocol of an annotation entry.";
    ProtocolsNotMerged on Service,
        "Services request several protocols of one Pod port, and each protocol has a separate node port. Load \
         balancers that ignore the protocol of an annotation entry, such as AKO and F5 CIS, put all of these node ports \
         into the pool of each protocol.",
        "Set `NPL_PROTOCOL_PAIRING=merged`, or ignore the Event if your load balancer evaluates the protocol.";
    UnsupportedFamily on Service,
        "The agent serves no IP family of the Service. The Service gets no node ports.",
        "Add IPv4 or IPv6 to `spec.ipFamilies`.";
    UnreadableSourceRange on Service,
        "An entry of `allowed-source-ranges` is not an address or a CIDR range. The agent ignores the entry and \
         applies the others. If the list has no valid entry, packets of all clients are dropped.",
        "Write the entry as `192.0.2.0/24` or `2001:db8::/32`.";
    TooManySourceRanges on Service,
        "`allowed-source-ranges` has more than 256 ranges. The agent ignores the ranges after the 256th: \
         packets of clients that are only in these ranges are dropped.",
        "Merge ranges, or use several Services.";
    SourceRangesExhausted on Pod,
        "The Node's map of allowed sources is full. Packets of clients whose range is not in the map are \
         dropped (`source_refused`).",
        "Shorten `allowed-source-ranges` of Services with Pods on the Node.";
    SourceRangesNotEnforced on Pod,
        "Clients reach the Pod by a `hostPort` or the host network, to which `allowed-source-ranges` does not apply.",
        "Remove `hostPort` or `hostNetwork` from the Pod, or restrict the port in the Node's firewall.";
}
