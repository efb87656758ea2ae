package health

import (
	_ "embed"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"gpu-cdi-plugin/gpu"
)

// Action is what must be done because of an event or a finding.
type Action string

// The actions, from the least to the most severe.
const (
	// None: nothing must be done.
	None Action = "none"
	// Application: an application on the device ends; the device stays healthy.
	Application Action = "application"
	// Probe: the event is no proof of a fault. The device is suspect until its probes are clean.
	Probe Action = "probe"
	// Reset, Reboot and Service: the device needs a reset, a reboot of the host, or an administrator.
	Reset   Action = "reset"
	Reboot  Action = "reboot"
	Service Action = "service"
)

var severity = []Action{None, Application, Probe, Reset, Reboot, Service}

// Actions returns the actions by name.
func Actions() []string {
	var list []string
	for _, a := range severity {
		list = append(list, string(a))
	}
	return list
}

// worse reports whether a is more severe than b.
func (a Action) worse(b Action) bool { return slices.Index(severity, a) > slices.Index(severity, b) }

// Rule decides what must be done because of events of an XID.
type Rule struct {
	Action Action
	// The action is taken at the Count-th event within the time Within; earlier events are only counted. 0 means 1.
	Count  int
	Within time.Duration
}

// MaxCount is the largest Rule.Count.
const MaxCount = 1000

//go:embed xids.tsv
var catalogueText string

// catalogued is an XID in NVIDIA's catalogue.
type catalogued struct {
	action Action
	name   string
}

// actions maps NVIDIA's immediate actions to ours.
var actions = map[string]Action{
	"IGNORE":            None,
	"RESTART_APP":       Application,
	"RESET_GPU":         Reset,
	"RESTART_BM":        Reboot,
	"RESTART_VM":        Reboot,
	"CHECK_MECHANICALS": Service,
	"UPDATE_SWFW":       Service,
	"CONTACT_SUPPORT":   Service,
	"CHECK_UVM":         None, // an effect of another error, which has an event of its own
	"XID_154":           None, // the driver's recovery action, which is read after each event
	"WORKFLOW_XID_45":   None, // an effect of another error, or the end of an application
	// A reset is needed if a row was remapped or a page retired, which probes detect.
	"WORKFLOW_XID_48":     Probe,
	"WORKFLOW_NVLINK_ERR": Probe, // probes detect links that stay down
	// The action depends on a part of the kernel's message that NVML does not report.
	"WORKFLOW_NVLINK5_ERR": Reset,
}

// catalogue is NVIDIA's catalogue by code.
var catalogue = parseCatalogue(catalogueText)

func parseCatalogue(text string) map[uint64]catalogued {
	all := map[uint64]catalogued{}
	for line := range strings.Lines(text) {
		fields := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		code, err := strconv.ParseUint(fields[0], 10, 64)
		if err == nil && len(fields) == 3 {
			all[code] = catalogued{actions[fields[1]], fields[2]}
		}
	}
	return all
}

// actionOf returns the action for a code according to the catalogue. If the code is not in it, probes decide.
func actionOf(code uint64) Action {
	if c, ok := catalogue[code]; ok {
		return c.action
	}
	return Probe
}

// XIDName returns an XID with its description, such as "XID 79 (GPU has fallen off the bus)".
func XIDName(code uint64) string {
	text := "XID " + strconv.FormatUint(code, 10)
	if name := catalogue[code].name; name != "" {
		text += " (" + name + ")"
	}
	return text
}

// recoveryActions say what the driver's recovery actions mean. The index is NVML's nvmlDeviceGpuRecoveryAction_t.
var recoveryActions = []struct {
	action Action
	text   string
}{
	{None, ""},
	{Reset, "the driver requires a reset of the GPU"},
	{Reboot, "the driver requires a reboot of the node"},
	{Reset, "the driver requires an end of the GPU's peer-to-peer traffic"},
	{Reset, "the driver requires that all processes on the GPU end, and a reset"},
	{Service, "the driver requires a recovery of the IMEX domain"},
	{Reset, "the driver requires a reset of the GPU's bus"},
	{Reboot, "the driver requires a reboot of the node"},
}

// recoveryFinding returns the finding for a recovery action, and whether there is one. A GPU with an unknown recovery
// action, for example of a newer driver, is not healthy.
func recoveryFinding(action int) (Finding, bool) {
	switch {
	case action == 0 || action == gpu.NoRecoveryAction:
		return Finding{}, false
	case action > 0 && action < len(recoveryActions):
		known := recoveryActions[action]
		return Finding{Text: known.text, Action: known.action}, true
	default:
		text := fmt.Sprintf("the driver requires the unknown recovery action %d", action)
		return Finding{Text: text, Action: Service}, true
	}
}
