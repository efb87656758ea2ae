package agent

import "gpu-cdi-plugin/internal/proc"

// podProcesses is the /proc of the kubelet, whose files are not below the host's root either.
const podProcesses = "/proc"

// runningPods returns the pods that have processes. It returns false if processes of pods cannot be seen.
func runningPods() (proc.Pods, bool) {
	if !proc.SeesPods(podProcesses) {
		return proc.Pods{}, false
	}
	pods, err := proc.RunningPods(podProcesses)
	if err != nil {
		return proc.Pods{Partial: true}, true // for example, too many files are open
	}
	return pods, true
}
