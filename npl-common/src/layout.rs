// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! The macro `map_type!` declares map types: structs that are keys, values or records of maps, or parts of such
//! structs. The macro asserts the size of each type at compile time, and contains the only `unsafe` code of this crate.

/// Describes a struct that `map_type!` declares, for `layout.snap` and for the reference page of maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// The type's name.
    pub name: &'static str,
    /// The doc comment of the type.
    pub help: &'static str,
    /// Size of the type in bytes.
    pub size: usize,
    /// Alignment of the type in bytes.
    pub align: usize,
    /// The fields in the order of their offsets.
    pub fields: &'static [FieldLayout],
}

/// Describes a field of a struct that `map_type!` declares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FieldLayout {
    /// The field's name.
    pub name: &'static str,
    /// The doc comment of the field.
    pub help: &'static str,
    /// The field's type as written in Rust.
    pub ty: &'static str,
    /// Offset of the field in bytes.
    pub offset: usize,
}

/// Declares a map type: a `#[repr(C)]` struct of the stated size. Implicit padding is a compile error, because the
/// bytes of the padding would be undefined.
macro_rules! map_type {
    (
        $(#[doc = $doc:literal])+
        pub struct $name:ident: $size:literal, align $align:literal {
            $( $(#[doc = $field_doc:literal])+ pub $field:ident: $ty:ty, )+
        }
    ) => {
        $(#[doc = $doc])+
        #[repr(C, align($align))]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name {
            $( $(#[doc = $field_doc])+ pub $field: $ty, )+
        }

        impl $name {
            /// Size, alignment and fields of this type.
            pub const LAYOUT: $crate::layout::Layout = $crate::layout::Layout {
                name: stringify!($name),
                help: concat!($($doc,)+).trim_ascii(),
                size: size_of::<Self>(),
                align: align_of::<Self>(),
                fields: &[ $( $crate::layout::FieldLayout {
                    name: stringify!($field),
                    help: concat!($($field_doc,)+).trim_ascii(),
                    ty: stringify!($ty),
                    offset: core::mem::offset_of!(Self, $field),
                }, )+ ],
            };
        }

        const _: () = {
            assert!(size_of::<$name>() == $size, "the size is part of the ABI");
            // The fields fill the type without padding, so that a map key has no undefined bytes.
            assert!($size == 0 $( + size_of::<$ty>() )+, "the type must have no implicit padding");
        };

        #[cfg(feature = "user")]
        #[expect(unsafe_code, reason = "aya's trait requires that every byte pattern is a valid value")]
        // SAFETY: the type is `repr(C)` and `Copy`, and has only integers and arrays of integers, without padding
        // (asserted above).
        unsafe impl aya::Pod for $name {}
    };
}

/// Every map type, in the order of `docs/reference/maps.md`.
pub const LAYOUTS: &[Layout] = &[
    crate::config::Config::LAYOUT,
    crate::mapping::NodeAddressV4::LAYOUT,
    crate::mapping::LocalAddress::LAYOUT,
    crate::mapping::Frontend::LAYOUT,
    crate::mapping::BackendV4::LAYOUT,
    crate::mapping::EndpointV4::LAYOUT,
    crate::mapping::Endpoint::LAYOUT,
    crate::flow::FlowKeyV4::LAYOUT,
    crate::flow::FlowState::LAYOUT,
    crate::flow::FlowV4::LAYOUT,
    crate::stats::MappingStats::LAYOUT,
    crate::mapping::NodeAddressV6::LAYOUT,
    crate::mapping::BackendV6::LAYOUT,
    crate::mapping::EndpointV6::LAYOUT,
    crate::flow::FlowKeyV6::LAYOUT,
    crate::flow::FlowV6::LAYOUT,
    crate::socket_rnat::SocketRnatKeyV4::LAYOUT,
    crate::socket_rnat::SocketRnatV4::LAYOUT,
    crate::socket_rnat::SocketRnatKeyV6::LAYOUT,
    crate::socket_rnat::SocketRnatV6::LAYOUT,
    crate::fragment_buffer::SavedFrame::LAYOUT,
    crate::mapping::SourceV4::LAYOUT,
    crate::mapping::SourceV6::LAYOUT,
    crate::next_hop::PodAddressV4::LAYOUT,
    crate::next_hop::PodAddressV6::LAYOUT,
    crate::next_hop::PodNextHop::LAYOUT,
    crate::next_hop::CachedNextHop::LAYOUT,
    crate::next_hop::RouteLookup::LAYOUT,
    crate::offload::StackSeen::LAYOUT,
    crate::lookup_cache::CachedMappingV4::LAYOUT,
    crate::lookup_cache::CachedMappingV6::LAYOUT,
    crate::lookup_cache::CachedReply::LAYOUT,
    crate::packet_trace::EndpointFilter::LAYOUT,
    crate::packet_trace::TraceFilter::LAYOUT,
    crate::packet_trace::PacketEnd::LAYOUT,
    crate::packet_trace::PacketCopy::LAYOUT,
    crate::packet_trace::TraceRecord::LAYOUT,
    crate::packet_trace::TraceCpu::LAYOUT,
];

#[cfg(test)]
mod tests {
    use core::fmt::Write as _;

    /// If this test fails because the layout of a map type has changed, the ABI has changed: increment `ABI_VERSION`,
    /// then run `UPDATE_EXPECT=1 cargo test -p npl-common`.
    #[test]
    fn layouts_are_the_committed_ones() {
        let mut text = format!("ABI {}\n", crate::names::ABI_VERSION);
        for layout in super::LAYOUTS {
            let _written = writeln!(text, "{} size {} align {}", layout.name, layout.size, layout.align);
            for field in layout.fields {
                let _written = writeln!(text, "  {:>3} {}", field.offset, field.name);
            }
        }
        for reason in crate::reason::Reason::ALL {
            let _written = writeln!(text, "reason {} {}", *reason as u32, reason.name());
        }
        expect_test::expect_file!["../layout.snap"].assert_eq(&text);
    }
}
