pub mod pure {
    pub mod units;
}
pub mod rt;
