package devicemanager

import (
	"testing"

	"k8s.io/klog/v2"

	"gpu-cdi-plugin/test/manager/behaviour"
)

func TestTheKubeletBehavesAsTheCasesSay(t *testing.T) {
	klog.SetLogger(klog.New(nil))
	behaviour.Test(t, behaviour.Subject{Name: "the kubelet's", New: NewKubelet, Kubelet: true})
}
