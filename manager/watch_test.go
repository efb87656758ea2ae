package manager_test

import (
	"context"
	"testing"

	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestWatchersGetChangesInOrder(t *testing.T) {
	n := newNode(t)
	ctx, cancel := context.WithCancel(t.Context())
	events := n.m.Watch(ctx)
	p := n.plugin(gpu, plugintest.Devices(1)...)
	request := pod("a", wants("main", gpu, 1))
	request.InitContainers = []model.Container{wants("init", gpu, 1)}
	n.admit(request)
	n.admit(request) // changes nothing
	testenv.Must(t, n.m.Ended(t.Context(), "a", "init"))
	n.release("a")
	p.Stop()
	n.awaitCount(gpu, manager.Count{Capacity: 1, Allocatable: 0})
	cancel()
	var got []manager.EventType
	for e := range events {
		got = append(got, e.Type)
		if e.Placement != nil && e.Placement.Pod.UID != "a" || e.Placement == nil && e.Resource != gpu {
			t.Errorf("an event has the pod %v and the resource %q", e.Placement, e.Resource)
		}
	}
	want := []manager.EventType{
		manager.ResourceChanged, manager.PodAdmitted, manager.ContainerEnded, manager.PodReleased, manager.ResourceChanged,
	}
	if len(got) < len(want) {
		t.Fatalf("got the events %v, want %v", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("got the events %v, want %v", got, want)
		}
	}
}

func TestSlowWatchersAreClosed(t *testing.T) {
	n := newNode(t)
	events := n.m.Watch(t.Context())
	p := n.plugin(gpu, plugintest.Devices(1)...)
	for i := range cap(events) + 1 {
		p.SetDevices(plugintest.Device("gpu-0000", i%2 == 1))
		n.awaitCount(gpu, manager.Count{Capacity: 1, Allocatable: i % 2})
	}
	count := 0
	for range events {
		count++
	}
	if count != cap(events) {
		t.Error("the watcher got", count, "events before its channel was closed")
	}
}

func TestWatchesEndWithTheManager(t *testing.T) {
	n := newNode(t)
	events := n.m.Watch(t.Context())
	n.stop()
	testenv.Must(t, n.end())
	if _, ok := <-events; ok {
		t.Error("an event came")
	}
	if _, ok := <-n.m.Watch(t.Context()); ok {
		t.Error("a manager that has ended sends an event")
	}
	if _, err := n.m.Admit(t.Context(), pod("a"), model.Caller{}); err == nil {
		t.Error("a manager that has ended admits a pod")
	}
}
