// The values of a GPU that the state file changes, and that the GPU has otherwise: health, settings, and how resets
// end. For each: its constant, its name in records, what a reset of the GPU does to it, the largest number, and its
// meaning, which gpu-sim prints. Package sim reads this file too: one value on two lines.
VALUE(RECOVERY_ACTION, "recovery-action", BY_VALUE, UINT32_MAX,
      "the driver's verdict: none, reset, reboot, drain-p2p, drain-and-reset, or any number")
VALUE(ECC_CORRECTED, "ecc-corrected", CLEARED, UINT64_MAX,
      "corrected memory errors since the driver loaded")
VALUE(ECC_UNCORRECTED, "ecc-uncorrected", CLEARED, UINT64_MAX,
      "uncorrected memory errors since the driver loaded")
VALUE(ECC_CORRECTED_AGGREGATE, "ecc-corrected-aggregate", KEPT, UINT64_MAX,
      "corrected memory errors of the GPU's life")
VALUE(ECC_UNCORRECTED_AGGREGATE, "ecc-uncorrected-aggregate", KEPT, UINT64_MAX,
      "uncorrected memory errors of the GPU's life")
VALUE(REMAPPED_CORRECTABLE, "remapped-correctable", KEPT, UINT32_MAX,
      "rows of memory remapped for corrected errors")
VALUE(REMAPPED_UNCORRECTABLE, "remapped-uncorrectable", KEPT, UINT32_MAX,
      "rows of memory remapped for uncorrected errors")
VALUE(REMAP_PENDING, "remap-pending", CLEARED, 1,
      "1: rows are remapped at the next reset")
VALUE(REMAP_FAILED, "remap-failed", KEPT, 1,
      "1: a row could not be remapped")
VALUE(RETIRED_SINGLE_BIT, "retired-single-bit", KEPT, 64,
      "pages of memory retired for corrected errors")
VALUE(RETIRED_DOUBLE_BIT, "retired-double-bit", KEPT, 64,
      "pages of memory retired for uncorrected errors")
VALUE(RETIREMENT_PENDING, "retirement-pending", CLEARED, 1,
      "1: pages are retired at the next reset")
VALUE(LINKS_DOWN, "links-down", CLEARED, UINT64_MAX,
      "NVLinks that are down: a comma-separated list of ports, all, or none")
VALUE(FABRIC_STATE, "fabric-state", CLEARED, 3,
      "with the fabric manager: not-supported, not-started, in-progress or completed")
VALUE(FABRIC_STATUS, "fabric-status", CLEARED, 999,
      "how the registration ended: an nvmlReturn_t")
VALUE(FABRIC_HEALTH, "fabric-health", CLEARED, 3,
      "health of the GPU's fabric: not-supported, healthy, unhealthy or limited-capacity")
VALUE(FABRIC_HEALTH_MASK, "fabric-health-mask", CLEARED, UINT32_MAX,
      "health of the GPU's fabric by cause: NVML_GPU_FABRIC_HEALTH_MASK_*")
VALUE(TEMPERATURE, "temperature", KEPT, 200,
      "temperature in degrees Celsius; the GPU shuts down at 92")
VALUE(MEMORY_USED, "memory-used", CLEARED, UINT64_MAX,
      "memory in use by no process, such as 512MiB")
VALUE(MEMORY_RESERVED, "memory-reserved", KEPT, UINT64_MAX,
      "memory that the driver reserves, such as 700MiB")
VALUE(COMPUTE_MODE, "compute-mode", CLEARED, 3,
      "compute mode: default, prohibited or exclusive-process")
VALUE(PERSISTENCE_MODE, "persistence-mode", KEPT, 1,
      "persistence mode: 1 on (the default), which blocks resets, or 0 off")
VALUE(ACCOUNTING_MODE, "accounting-mode", CLEARED, 1,
      "accounting mode: 1 on, or 0 off (the default)")
VALUE(APPLICATION_CLOCK_GRAPHICS, "application-clock-graphics", CLEARED, UINT32_MAX,
      "application clock of the graphics units in MHz")
VALUE(APPLICATION_CLOCK_MEMORY, "application-clock-memory", CLEARED, UINT32_MAX,
      "application clock of the memory in MHz")
VALUE(LOCKED_CLOCK_GRAPHICS_MIN, "locked-clock-graphics-min", CLEARED, UINT32_MAX,
      "lower limit of the graphics clock in MHz")
VALUE(LOCKED_CLOCK_GRAPHICS_MAX, "locked-clock-graphics-max", CLEARED, UINT32_MAX,
      "upper limit of the graphics clock in MHz")
VALUE(LOCKED_CLOCK_MEMORY_MIN, "locked-clock-memory-min", CLEARED, UINT32_MAX,
      "lower limit of the memory clock in MHz")
VALUE(LOCKED_CLOCK_MEMORY_MAX, "locked-clock-memory-max", CLEARED, UINT32_MAX,
      "upper limit of the memory clock in MHz")
VALUE(POWER_LIMIT, "power-limit", CLEARED, UINT32_MAX,
      "power limit in milliwatts")
VALUE(RESET_RESULT, "reset-result", KEPT, 4,
      "how resets end; see 'gpu-sim fault DIR reset'")
VALUE(RESET_TRIES, "reset-tries", KEPT, UINT32_MAX,
      "how many more resets end so; without it all do")
VALUE(RESET_DELAY, "reset-delay", KEPT, 3600000,
      "how long a reset takes, in milliseconds")
