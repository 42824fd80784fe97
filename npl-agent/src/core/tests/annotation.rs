// SPDX-License-Identifier: Apache-2.0
//! Every form of the annotation that was ever seen, and hostile ones.
