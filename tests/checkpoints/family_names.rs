//! Tests that names and fields of families are unambiguous.
use std::collections::BTreeSet;

use expertd_model::{FAMILIES, by_model_type};

#[test]
fn every_model_type_belongs_to_one_family() {
    let mut seen = BTreeSet::new();
    for family in FAMILIES {
        assert!(seen.insert(family.name), "two families have the name {}", family.name);
        for model_type in family.model_types {
            assert_eq!(by_model_type(model_type).unwrap().name, family.name, "{model_type}");
        }
        for field in family.ignores() {
            assert!(
                !family.uses().contains(&field),
                "{}: {field} is listed both as used and as ignored",
                family.name
            );
        }
    }
}
