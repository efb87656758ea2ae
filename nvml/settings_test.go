package nvml

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	mockserver "github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"
	"github.com/google/go-cmp/cmp"
)

// mockSettings are the settings of a GPU of the mock, each at its default.
type mockSettings struct {
	clocks      map[nvml.ClockType]uint32
	power       uint32
	mode        nvml.ComputeMode
	ecc         map[nvml.MemoryErrorType]uint64
	accounting  nvml.EnableState
	pids        []int
	persistence nvml.EnableState
	fails       map[string]nvml.Return // by function
	set         []string               // the functions that changed something
}

func mockDefaults() *mockSettings {
	return &mockSettings{
		clocks: map[nvml.ClockType]uint32{nvml.CLOCK_GRAPHICS: 1095, nvml.CLOCK_MEM: 1215},
		power:  400_000, ecc: map[nvml.MemoryErrorType]uint64{}, fails: map[string]nvml.Return{},
	}
}

// on makes a GPU of the mock have the settings.
func (m *mockSettings) on(d *mockserver.Device) {
	change := func(function string, f func()) nvml.Return {
		m.set = append(m.set, function)
		if code := m.fails[function]; code != nvml.SUCCESS {
			return code
		}
		f()
		return nvml.SUCCESS
	}
	d.IsMigDeviceHandleFunc = func() (bool, nvml.Return) { return false, nvml.SUCCESS }
	d.GetApplicationsClockFunc = func(kind nvml.ClockType) (uint32, nvml.Return) {
		return m.clocks[kind], m.fails["GetApplicationsClock"]
	}
	d.GetDefaultApplicationsClockFunc = func(kind nvml.ClockType) (uint32, nvml.Return) {
		return mockDefaults().clocks[kind], nvml.SUCCESS
	}
	d.ResetApplicationsClocksFunc = func() nvml.Return {
		return change("ResetApplicationsClocks", func() { m.clocks = mockDefaults().clocks })
	}
	d.ResetGpuLockedClocksFunc = func() nvml.Return { return change("ResetGpuLockedClocks", func() {}) }
	d.ResetMemoryLockedClocksFunc = func() nvml.Return { return change("ResetMemoryLockedClocks", func() {}) }
	d.GetPowerManagementLimitFunc = func() (uint32, nvml.Return) { return m.power, m.fails["GetPowerManagementLimit"] }
	d.GetPowerManagementDefaultLimitFunc = func() (uint32, nvml.Return) { return mockDefaults().power, nvml.SUCCESS }
	d.SetPowerManagementLimitFunc = func(limit uint32) nvml.Return {
		return change("SetPowerManagementLimit", func() { m.power = limit })
	}
	d.GetComputeModeFunc = func() (nvml.ComputeMode, nvml.Return) { return m.mode, m.fails["GetComputeMode"] }
	d.SetComputeModeFunc = func(mode nvml.ComputeMode) nvml.Return {
		return change("SetComputeMode", func() { m.mode = mode })
	}
	d.GetTotalEccErrorsFunc = func(kind nvml.MemoryErrorType, _ nvml.EccCounterType) (uint64, nvml.Return) {
		return m.ecc[kind], m.fails["GetTotalEccErrors"]
	}
	d.ClearEccErrorCountsFunc = func(counter nvml.EccCounterType) nvml.Return {
		return change("ClearEccErrorCounts", func() {
			if counter == nvml.VOLATILE_ECC { // the aggregate ones are the GPU's history
				clear(m.ecc)
			}
		})
	}
	d.GetAccountingModeFunc = func() (nvml.EnableState, nvml.Return) {
		return m.accounting, m.fails["GetAccountingMode"]
	}
	d.GetAccountingPidsFunc = func() ([]int, nvml.Return) { return m.pids, nvml.SUCCESS }
	d.ClearAccountingPidsFunc = func() nvml.Return { return change("ClearAccountingPids", func() { m.pids = nil }) }
	d.GetPersistenceModeFunc = func() (nvml.EnableState, nvml.Return) {
		return m.persistence, m.fails["GetPersistenceMode"]
	}
	d.SetPersistenceModeFunc = func(mode nvml.EnableState) nvml.Return {
		return change("SetPersistenceMode", func() { m.persistence = mode })
	}
}

func TestRestoreDefaults(t *testing.T) {
	const notSupported = nvml.ERROR_NOT_SUPPORTED
	unlock := []string{"ResetGpuLockedClocks", "ResetMemoryLockedClocks"}
	for name, c := range map[string]struct {
		change    func(m *mockSettings)
		exclusive bool
		want      []string // what was changed
		set       []string // functions, sorted
		err       string
	}{
		"all at their defaults": {func(*mockSettings) {}, false, nil, unlock, ""},
		"all changed": {
			func(m *mockSettings) {
				m.clocks[nvml.CLOCK_GRAPHICS], m.power, m.mode = 210, 200_000, nvml.COMPUTEMODE_PROHIBITED
				m.ecc[nvml.MEMORY_ERROR_TYPE_CORRECTED] = 7
				m.accounting, m.pids = nvml.FEATURE_ENABLED, []int{4711, 4712}
			}, false,
			[]string{
				"application clocks 210 MHz (graphics) and 1215 MHz (memory) instead of 1095 MHz and 1215 MHz",
				"power limit 200 W instead of 400 W", "compute mode PROHIBITED instead of DEFAULT",
				"volatile ECC error counts 7 (corrected) and 0 (uncorrected)", "accounting of 2 processes",
			},
			append([]string{
				"ClearAccountingPids", "ClearEccErrorCounts", "ResetApplicationsClocks", "SetComputeMode",
				"SetPowerManagementLimit",
			}, unlock...), "",
		},
		"the compute mode that MPS needs": {
			func(m *mockSettings) { m.mode = nvml.COMPUTEMODE_EXCLUSIVE_PROCESS }, true, nil, unlock, "",
		},
		"MPS needs another compute mode": {
			func(*mockSettings) {}, true,
			[]string{"compute mode DEFAULT instead of EXCLUSIVE_PROCESS"},
			append([]string{"SetComputeMode"}, unlock...), "",
		},
		"a GPU that supports nothing": {
			func(m *mockSettings) {
				for _, function := range []string{
					"GetApplicationsClock", "ResetGpuLockedClocks", "ResetMemoryLockedClocks",
					"GetPowerManagementLimit",
					"GetComputeMode", "GetTotalEccErrors", "GetAccountingMode",
				} {
					m.fails[function] = notSupported
				}
			}, false, nil, unlock, "",
		},
		"a setting that can be read but not changed": {
			func(m *mockSettings) { m.power, m.fails["SetPowerManagementLimit"] = 200_000, notSupported }, false, nil,
			append([]string{"SetPowerManagementLimit"}, unlock...), "",
		},
		"an error": {
			func(m *mockSettings) {
				m.clocks[nvml.CLOCK_MEM], m.power, m.fails["SetPowerManagementLimit"] = 810, 200_000, nvml.ERROR_UNKNOWN
			}, false,
			[]string{"application clocks 1095 MHz (graphics) and 810 MHz (memory) instead of 1095 MHz and 1215 MHz"},
			append([]string{"ResetApplicationsClocks", "SetPowerManagementLimit"}, unlock...),
			"nvmlDeviceSetPowerManagementLimit: ",
		},
	} {
		t.Run(name, func(t *testing.T) {
			session, server := openMock(t)
			m := mockDefaults()
			c.change(m)
			m.on(device(server, 3))
			uuid := device(server, 3).UUID
			changed, err := session.RestoreDefaults(t.Context(), uuid, c.exclusive)
			if diff := cmp.Diff(c.want, changed); diff != "" {
				t.Errorf("changed (-want +got):\n%s", diff)
			}
			slices.Sort(m.set)
			slices.Sort(c.set)
			if diff := cmp.Diff(c.set, m.set); diff != "" {
				t.Errorf("functions (-want +got):\n%s", diff)
			}
			if c.err != "" {
				if err == nil || !strings.HasPrefix(err.Error(), "restore the settings of "+uuid+": "+c.err) {
					t.Errorf("error %v", err)
				}
				return
			}
			testenv.Must(t, err)
			if again, err := session.RestoreDefaults(t.Context(), uuid, c.exclusive); len(m.fails) == 0 &&
				len(again) > 0 ||
				err != nil {
				t.Errorf("again: %v, error %v", again, err)
			}
		})
	}
}

func TestRestoreDefaultsWithoutPermission(t *testing.T) {
	session, server := openMock(t)
	m := mockDefaults()
	m.fails["ResetGpuLockedClocks"] = nvml.ERROR_NO_PERMISSION
	m.on(device(server, 0))
	if _, err := session.RestoreDefaults(t.Context(), device(server, 0).UUID, false); !errors.Is(err, ErrNoPermission) {
		t.Errorf("error %v", err)
	}
}

func TestMIGDevicesHaveNoSettings(t *testing.T) {
	session, server := openMock(t)
	m := mockDefaults()
	m.on(device(server, 0))
	device(server, 0).IsMigDeviceHandleFunc = func() (bool, nvml.Return) { return true, nvml.SUCCESS }
	_, err := session.RestoreDefaults(t.Context(), device(server, 0).UUID, false)
	_, errPersistence := session.SetPersistence(t.Context(), device(server, 0).UUID, false)
	if !errors.Is(err, errNotWhole) || !errors.Is(errPersistence, errNotWhole) || len(m.set) > 0 {
		t.Errorf("errors %v, %v; functions %v", err, errPersistence, m.set)
	}
}

func TestSetPersistence(t *testing.T) {
	session, server := openMock(t)
	m := mockDefaults()
	m.persistence = nvml.FEATURE_ENABLED
	m.on(device(server, 0))
	for _, c := range []struct {
		on, changed bool
		fails       nvml.Return
		err         error
	}{
		{on: true},
		{on: false, changed: true},
		{on: false},
		{on: true, changed: true},
		{on: false, fails: nvml.ERROR_NOT_SUPPORTED},
		{on: false, fails: nvml.ERROR_NO_PERMISSION, err: ErrNoPermission},
	} {
		m.fails["GetPersistenceMode"] = c.fails
		changed, err := session.SetPersistence(t.Context(), device(server, 0).UUID, c.on)
		if changed != c.changed || !errors.Is(err, c.err) ||
			c.fails == 0 && (m.persistence == nvml.FEATURE_ENABLED) != c.on {
			t.Errorf("%+v: changed %t, error %v, mode %d", c, changed, err, m.persistence)
		}
	}
}
