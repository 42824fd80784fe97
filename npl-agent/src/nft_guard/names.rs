// SPDX-License-Identifier: Apache-2.0
//! Reads the names of netfilter's tables and chains, by which the agent recognizes the Node's CNI and policy engine.

use std::{io, ops::ControlFlow};

use super::{
    legacy,
    table::if_known,
    uapi::{attribute, message},
    wire::{Connection, Message, find},
};
use crate::core::{
    model::Family,
    networks::{RuleNames, chain_prefixes},
};

pub(super) fn read() -> io::Result<RuleNames> {
    let mut names = RuleNames::default();
    if let Some(connection) = if_known(Connection::open())? {
        let chains = Message::new(message::GET_CHAIN, Vec::new()).of_any_family();
        if_known(connection.list(chains, |chain| {
            names.tables.extend(text(chain, attribute::TABLE));
            names.chains.extend(text(chain, attribute::CHAIN_NAME));
            ControlFlow::Continue(())
        }))?;
    }
    for family in Family::ALL {
        // Only tables that exist are read, because a request for an absent table would make the kernel load the table's
        // module.
        for table in legacy::tables(family)? {
            let rules = legacy::read(family, &table)?;
            names.chains.extend(chain_prefixes().filter(|prefix| legacy::names(&rules, prefix)).map(str::to_owned));
        }
    }
    Ok(names)
}

pub(super) fn text(object: &[u8], kind: u16) -> Option<String> {
    let text = find(object, kind)?.strip_suffix(&[0])?;
    String::from_utf8(text.to_vec()).ok()
}
