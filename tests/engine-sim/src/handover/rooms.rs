//! SGLang's rooms: a number that a router makes up and gives to both engines, under which they find each
//! other. Prefill opens it, decode takes what is in it, once.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// Rooms that are remembered when they are closed, to notice that one is used again. Rooms are drawn from
/// 63 bits: whoever repeats one repeats it soon.
const MAX_CLOSED: usize = 4096;

/// What a decode engine finds in a room.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Offer {
    /// Digest over the ids of the prompt.
    pub(crate) prompt_sha256: String,
    /// What prefill had in its own cache; decode reports it as usage.
    pub(crate) cached_tokens: usize,
}

/// The rooms of one prefill engine.
#[derive(Default)]
pub(crate) struct Rooms {
    state: Mutex<State>,
    /// Tells whoever waits to look again.
    changed: watch::Sender<()>,
}

#[derive(Default)]
struct State {
    /// By room and rank.
    open: HashMap<(u64, u64), Room>,
    /// The last rooms that were closed, and whether they had been taken.
    closed: VecDeque<(u64, bool)>,
}

enum Room {
    Computing,
    Ready(Offer),
    Taken,
}

/// A room that is open until this is dropped.
pub(crate) struct OpenRoom {
    rooms: Arc<Rooms>,
    room: u64,
    rank: u64,
}

/// What one look into the rooms found.
enum Look {
    Found(Offer),
    NotYet,
    TakenBefore,
}

impl Rooms {
    /// Opens a room; none if it is or was open before.
    pub(crate) fn open_room(self: &Arc<Self>, room: u64, rank: u64) -> Option<OpenRoom> {
        let mut state = self.state.lock();
        let is_open = state.open.keys().any(|(open, _)| *open == room);
        if is_open || state.closed.iter().any(|(closed, _)| *closed == room) {
            return None;
        }
        state.open.insert((room, rank), Room::Computing);
        Some(OpenRoom { rooms: Arc::clone(self), room, rank })
    }

    /// Waits for a room and takes what is in it; none if somebody else did.
    pub(crate) async fn take(&self, room: u64, rank: u64) -> Option<Offer> {
        let mut changes = self.changed.subscribe();
        loop {
            let look = self.look(room, rank);
            match look {
                Look::Found(offer) => {
                    self.changed.send_replace(());
                    return Some(offer);
                }
                Look::TakenBefore => return None,
                Look::NotYet => {}
            }
            if changes.changed().await.is_err() {
                return None;
            }
        }
    }

    fn look(&self, room: u64, rank: u64) -> Look {
        let mut state = self.state.lock();
        let State { open, closed } = &mut *state;
        match open.get_mut(&(room, rank)) {
            Some(found @ Room::Ready(_)) => match std::mem::replace(found, Room::Taken) {
                Room::Ready(offer) => Look::Found(offer),
                Room::Computing | Room::Taken => Look::NotYet,
            },
            Some(Room::Taken) => Look::TakenBefore,
            Some(Room::Computing) => Look::NotYet,
            None if closed.contains(&(room, true)) => Look::TakenBefore,
            None => Look::NotYet,
        }
    }

    /// Rooms that are open.
    pub(crate) fn open(&self) -> usize {
        self.state.lock().open.len()
    }

    /// A new process knows no rooms.
    pub(crate) fn forget(&self) {
        *self.state.lock() = State::default();
    }
}

impl OpenRoom {
    /// The prompt is computed.
    pub(crate) fn fill(&self, offer: Offer) {
        if let Some(room) = self.rooms.state.lock().open.get_mut(&(self.room, self.rank)) {
            *room = Room::Ready(offer);
        }
        self.rooms.changed.send_replace(());
    }

    pub(crate) fn is_taken(&self) -> bool {
        matches!(self.rooms.state.lock().open.get(&(self.room, self.rank)), Some(Room::Taken))
    }

    /// Waits until it is taken.
    pub(crate) async fn taken(&self) {
        let mut changes = self.rooms.changed.subscribe();
        while !self.is_taken() {
            // Its sender lives as long as `self.rooms`.
            let _ = changes.changed().await;
        }
    }
}

impl Drop for OpenRoom {
    fn drop(&mut self) {
        let mut state = self.rooms.state.lock();
        // After a restart the room is not ours any more.
        let Some(room) = state.open.remove(&(self.room, self.rank)) else { return };
        if state.closed.len() == MAX_CLOSED {
            state.closed.pop_front();
        }
        state.closed.push_back((self.room, matches!(room, Room::Taken)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer() -> Offer {
        Offer { prompt_sha256: "p".to_owned(), cached_tokens: 3 }
    }

    /// Whether taking it does not end by itself. Time is paused: it costs none.
    async fn waits(rooms: &Rooms, room: u64, rank: u64) -> bool {
        let taking = rooms.take(room, rank);
        tokio::time::timeout(std::time::Duration::from_secs(60), taking).await.is_err()
    }

    #[tokio::test(start_paused = true)]
    async fn a_room_is_found_by_number_and_rank_whoever_comes_first() {
        let rooms = Arc::new(Rooms::default());
        let early = tokio::spawn({
            let rooms = Arc::clone(&rooms);
            async move { rooms.take(7, 1).await }
        });
        let room = rooms.open_room(7, 1).unwrap();
        assert!(waits(&rooms, 7, 1).await, "nothing is computed yet");
        room.fill(offer());
        assert_eq!(early.await.unwrap(), Some(offer()));
        room.taken().await;
        let other = rooms.open_room(8, 0).unwrap();
        other.fill(offer());
        assert!(waits(&rooms, 8, 1).await, "another rank has it");
        assert!(waits(&rooms, 9, 0).await, "nobody opened it");
        assert_eq!(rooms.take(8, 0).await, Some(offer()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_room_is_used_once() {
        let rooms = Arc::new(Rooms::default());
        let room = rooms.open_room(7, 0).unwrap();
        assert!(rooms.open_room(7, 0).is_none() && rooms.open_room(7, 1).is_none(), "while it is open");
        room.fill(offer());
        assert_eq!(rooms.take(7, 0).await, Some(offer()));
        assert_eq!(rooms.take(7, 0).await, None, "taken while open");
        drop(room);
        assert_eq!(rooms.take(7, 0).await, None, "taken and closed");
        assert!(rooms.open_room(7, 0).is_none(), "after it was closed");
        drop(rooms.open_room(5, 0).unwrap());
        assert!(waits(&rooms, 5, 0).await, "an abandoned room keeps decode waiting");
        rooms.forget();
        assert_eq!(rooms.open(), 0);
        assert!(rooms.open_room(7, 0).is_some(), "another process has not seen it");
    }
}
