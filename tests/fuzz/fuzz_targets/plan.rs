#![cfg_attr(fuzzing, no_main)]

forebay_fuzz::target!(forebay_fuzz::plan::run);
