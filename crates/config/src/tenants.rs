//! `[tenants]`: quotas by tenant.

use super::{Config, validate::Check};

impl Config {
    pub(super) fn check_tenants(&self, check: &mut Check) {
        for name in self.tenants.keys().filter(|name| name.is_empty()) {
            check.fail(
                "tenants",
                name,
                "a tenant without a name",
                "use the name that listeners or claims have",
            );
        }
    }
}
