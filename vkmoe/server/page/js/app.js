// Puts the page together.

import * as api from "./api.js";
import { mountExperts } from "./experts/panel.js";

mountExperts(document.getElementById("experts"), api);
